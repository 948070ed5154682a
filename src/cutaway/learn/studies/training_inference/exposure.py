"""Exposure bias: a model after text of the source, and after its own text; the loss and the entropy of the source."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.learn.studies.study import Estimate, estimate, exact
from cutaway.learn.studies.train_grid import TrainedGrid, TrainingData, TrainingGrid, next_token_loss, train_grid
from cutaway.learn.studies.training_inference.sources import FiniteText, PairChain, Source, TopicChain
from cutaway.lens.trace import trace
from cutaway.model import build

NUM_SEEDS = 10
PROMPT_LEN, NUM_STEPS = 8, 32
"""Tokens of the source before the continuation, and tokens of the continuation."""
NUM_CONTINUATIONS = 1024
RANGES = {"1": slice(0, 1), "2-8": slice(1, 8), "9-16": slice(8, 16), "17-32": slice(16, 32)}
"""Steps of the continuation, from the first token that the model writes."""
SOURCES: dict[str, Source] = {"pair": PairChain(), "topic": TopicChain()}
BUDGETS = {"pair": (100, 400, 1600), "topic": (800, 1600)}
"""Numbers of training steps of 16 sequences."""
UPDATE_LAYERS, UPDATE_STEPS = 6, (0, 100, 400)
FINITE_SEQUENCES, FINITE_STEPS = 32, 400


def decoder_config(num_symbols: int, layers: int = 2) -> cfg.Decoder:
    block = cfg.Block(attention=cfg.MultiHead(heads=2), ffn=cfg.Mlp())
    return cfg.Decoder(vocab_size=num_symbols, d_model=32, decoder=cfg.Stack(layers=layers, block=block))


@cache
def train(name: str, steps: int, device: str, num_seeds: int = NUM_SEEDS, layers: int = 2) -> TrainedGrid:
    """Train models of a source. The result is kept, because several measurements use it."""
    return train_on(SOURCES[name], SOURCES[name].num_symbols, steps, device, num_seeds, layers)


def train_on(
    data: TrainingData, num_symbols: int, steps: int, device: str, num_seeds: int = NUM_SEEDS, layers: int = 2
) -> TrainedGrid:
    grid = TrainingGrid((5e-3,), (20,), num_seeds, steps, batch_size=16, seq_len=PROMPT_LEN + NUM_STEPS)
    config = decoder_config(num_symbols, layers)
    return train_grid(lambda seed: build(config, seed=seed), data, grid, device=device)


@torch.no_grad()
def continue_text(model: nn.Module, prompt: Tensor, num_steps: int, generator: torch.Generator) -> Tensor:
    """`prompt` and `num_steps` tokens that are sampled from the model."""
    tokens = prompt
    for _ in range(num_steps):
        probs = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], 1)
    return tokens


@dataclass(frozen=True)
class ContinuationStats:
    """Measurements of a text (B, PROMPT_LEN + steps) at each step after the prompt, (B, steps)."""

    kl: Tensor
    """KL divergence of the model's next-token probabilities from those of the source, after the same tokens."""
    source_loss: Tensor
    """−log of the probability of the token under the source."""
    error_prob: Tensor
    """Probability that the model gives to tokens which the source emits only as noise."""
    is_error: Tensor
    """Whether the token is one that the source emits only as noise."""


@torch.no_grad()
def measure_continuation(model: nn.Module, source: Source, tokens: Tensor) -> ContinuationStats:
    probs = source.next_probs(tokens)[:, PROMPT_LEN - 1 : -1]
    logprobs = model(tokens).log_softmax(-1)[:, PROMPT_LEN - 1 : -1]
    only_noise = probs < 2 * source.noise / source.num_symbols
    written = tokens[:, PROMPT_LEN:, None]
    return ContinuationStats(
        kl=(torch.xlogy(probs, probs) - probs * logprobs).sum(-1),
        source_loss=-probs.gather(2, written)[..., 0].log(),
        error_prob=(logprobs.exp() * only_noise).sum(-1),
        is_error=only_noise.gather(2, written)[..., 0],
    )


def measure_exposure(device: str) -> dict[str, Estimate]:
    """Quality of a model after its own text relative to text of the source, by source, training steps and distance."""
    estimates: dict[str, Estimate] = {}
    for name, budgets in BUDGETS.items():
        for steps in budgets:
            estimates |= compare_contexts(name, train(name, steps, device), device)
    return estimates


def compare_contexts(name: str, trained: TrainedGrid, device: str) -> dict[str, Estimate]:
    """Measurements of one grid of trained models. The interval is over its seeds."""
    source, values = SOURCES[name], dict[str, list[float]]()
    for index, (_, _, seed) in enumerate(trained.grid.members):
        for key, value in _compare_contexts_of_model(trained.load_member(index), source, seed, device).items():
            values.setdefault(key, []).append(value)
    prefix, ratios = f"exposure/{name}/{trained.grid.steps}", ("own-to-gold", "error-after-error")
    return {f"{prefix}/{key}": estimate(each, ratio=key.startswith(ratios)) for key, each in values.items()}


def _compare_contexts_of_model(model: nn.Module, source: Source, seed: int, device: str) -> dict[str, float]:
    gold_tokens = source.sample(
        NUM_CONTINUATIONS, PROMPT_LEN + NUM_STEPS, torch.Generator().manual_seed(10_000 + seed)
    ).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    own_tokens = continue_text(model, gold_tokens[:, :PROMPT_LEN], NUM_STEPS, generator)
    gold, own = (measure_continuation(model, source, tokens) for tokens in (gold_tokens, own_tokens))
    error_rate = float(gold.error_prob.mean())
    values = {
        "gold-kl": float(gold.kl.mean()),
        "gold-error": error_rate,
        "error-free": float((~own.is_error).all(1).float().mean()),
        "error-free-if-independent": (1 - error_rate) ** NUM_STEPS,
    }
    for name, steps in RANGES.items():
        values[f"own-to-gold-kl/{name}"] = float(own.kl[:, steps].mean() / gold.kl[:, steps].mean())
        values[f"own-excess-loss/{name}"] = float((own.source_loss - gold.source_loss)[:, steps].mean())
        values[f"own-error/{name}"] = float(own.error_prob[:, steps].mean())
    was_error = own.is_error[:, :-1]
    after = own.error_prob[:, 1:]
    values["error-after-error"] = float(after[was_error].mean() / after[~was_error].mean())
    return values


def measure_entropy_floor(device: str) -> dict[str, Estimate]:
    """Loss on fresh text minus the entropy rate of the source by training steps, and after a finite text."""
    source = PairChain()
    estimates = {"floor/entropy-rate": exact(source.entropy_rate)}
    for steps in BUDGETS["pair"]:
        losses = fresh_losses(train("pair", steps, device), source, device)
        above = sum(loss > source.entropy_rate for loss in losses)
        estimates[f"floor/loss/{steps}"] = estimate(losses)
        estimates[f"floor/excess/{steps}"] = estimate([loss - source.entropy_rate for loss in losses])
        estimates[f"floor/seeds-above/{steps}"] = exact(above, len(losses))
    finite = FiniteText(source, FINITE_SEQUENCES)
    trained = train_on(finite, source.num_symbols, FINITE_STEPS, device)
    text = finite.text(PROMPT_LEN + NUM_STEPS).to(device)
    train_losses = [float(_loss(trained.load_member(i), text)) for i in range(trained.grid.num_seeds)]
    excess = [loss - source.entropy_rate for loss in fresh_losses(trained, source, device)]
    return estimates | {
        "floor/finite/train-excess": estimate([loss - source.entropy_rate for loss in train_losses]),
        "floor/finite/fresh-excess": estimate(excess),
    }


def fresh_losses(trained: TrainedGrid, source: Source, device: str) -> list[float]:
    """Loss of each member on new text of the source, from the third token, before which a pair is known."""
    tokens = source.sample(4096, PROMPT_LEN + NUM_STEPS, torch.Generator().manual_seed(20_000)).to(device)
    return [float(_loss(trained.load_member(index), tokens)) for index in range(len(trained.grid.members))]


@torch.no_grad()
def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return next_token_loss(model(tokens)[:, 1:], tokens[:, 1:])


def measure_update_ratio(device: str) -> dict[str, Estimate]:
    """Norm of what a sublayer adds, relative to the norm of the residual stream, by layer and training steps."""
    ratios: dict[str, list[float]] = {}
    tokens = PairChain().sample(16, PROMPT_LEN + NUM_STEPS, torch.Generator().manual_seed(1)).to(device)
    for steps in UPDATE_STEPS:
        for model in _models_after(steps, device):
            for key, ratio in update_ratios(model, tokens).items():
                ratios.setdefault(f"update-ratio/{key}/{steps}", []).append(ratio)
    return {key: estimate(values, ratio=True) for key, values in ratios.items()}


def _models_after(steps: int, device: str) -> Iterator[nn.Module]:
    """The models of all seeds, one after the other."""
    if steps == 0:
        config = decoder_config(PairChain().num_symbols, UPDATE_LAYERS)
        return (build(config, seed=seed, device=device) for seed in range(NUM_SEEDS))
    trained = train("pair", steps, device, layers=UPDATE_LAYERS)
    return (trained.load_member(index) for index in range(NUM_SEEDS))


@torch.no_grad()
def update_ratios(model: Any, tokens: Tensor) -> dict[str, float]:
    """For `attn/LAYER` and `ffn/LAYER`, the mean over tokens of ‖update‖ / ‖stream before it‖."""
    with trace(model, "resid_pre", "resid_mid", "resid_post") as t:
        model(tokens)
    ratios: dict[str, float] = {}
    for layer in range(len(model.decoder.blocks)):
        pre, mid, post = (t[f"blocks.{layer}.resid_{name}"] for name in ("pre", "mid", "post"))
        for name, before, after in (("attn", pre, mid), ("ffn", mid, post)):
            ratios[f"{name}/{layer}"] = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())
    return ratios
