"""What an engine answers is what the model says: token by token equal to the full pass, whoever else is there."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import LENGTH, SEEDS, configs, lively, tokens_for

from cutaway import config as c
from cutaway.generate import Engine, Generation, Plan, Settings, generate
from cutaway.model import Transformer, build

KINDS = ["full", "ring", "paged"]


def prompts_for(config: c.Config, seed: int, lengths: tuple[int, ...] = (1, 5, 3, 7)) -> list[list[int]]:
    which = "source" if config.form == "encoder-decoder" else "tokens"
    return [tokens_for(config, 1, n, seed + n, which)[0].tolist() for n in lengths]


def said_by_full_pass(model: Any, prompt: list[int], answer: Generation) -> torch.Tensor:
    """Log-probabilities of the answer's tokens in one pass over everything, without a cache."""
    tokens = torch.tensor([answer.tokens])
    if "encoder" in model.stacks:
        target = torch.cat((torch.zeros(1, 1, dtype=torch.long), tokens), 1)
        logits = model(torch.tensor([prompt]), target)[:, :-1]
    else:
        logits = model(torch.tensor([prompt + answer.tokens]))[:, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1))[0, :, 0]


def engine_for(model: Transformer, prompts: list[list[int]], **how: Any) -> Engine:
    longest = max(map(len, prompts))
    return Engine(Plan(model, **{"context": 2 * LENGTH, "decoder_start": 0, "source": longest, **how}))


@given(
    config=configs(("decoder", "encoder-decoder")),
    seed=SEEDS,
    kind=st.sampled_from(KINDS),
    chunk=st.integers(1, LENGTH),
    rows=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 1.0]),
)
@torch.no_grad()
def test_answers_are_the_full_pass(
    config: c.Config, seed: int, kind: str, chunk: int, rows: int, temperature: float
) -> None:
    """Ragged prompts, more requests than rows, prompts in pieces of any size, past the windows' wrap."""
    model = lively(config, torch.float64, seed)
    prompts = prompts_for(config, seed)
    if kind == "ring" and model.stacks["decoder"].turns:
        kind = "full"
    engine = engine_for(model, prompts, rows=rows, kind=kind, chunk=chunk)
    asked = [Settings(max_new_tokens=LENGTH - i, temperature=temperature, logprobs=0) for i in range(len(prompts))]
    tickets = [engine.submit(prompt, own, seed=i) for i, (prompt, own) in enumerate(zip(prompts, asked, strict=True))]
    engine.run()
    for prompt, ticket in zip(prompts, tickets, strict=True):
        answer = ticket.result()
        assert len(answer.tokens) == ticket.settings.max_new_tokens
        assert answer.logprobs == pytest.approx(said_by_full_pass(model, prompt, answer).tolist(), abs=2e-5)
        if temperature == 0:
            assert max(said_by_full_pass(model, prompt, answer).exp().tolist()) <= 1
    alone = engine_for(model, prompts, rows=1, kind=kind, chunk=chunk)
    again = alone.submit(prompts[1], asked[1], seed=1)
    alone.run()
    assert again.result().tokens == tickets[1].result().tokens
