"""Analyses: parts add up to what they are parts of, and planted facts are found."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from support.config_strategies import SEEDS, build_randomized_model, configs, random_tokens

import cutaway as ct
from cutaway import config as c
from cutaway.errors import InputError
from cutaway.lens.analysis import (
    LabeledTensor,
    attention_entropy,
    direct_logit_attribution,
    gradient_by_depth,
    gradient_by_placement,
    head_scores,
    logit_lens,
    neuron_activations,
    neuron_logit_effects,
    position_similarity,
    resid_norms,
    update_cosine_similarities,
    update_norm_ratios,
)
from cutaway.lens.analysis.attention_heads import HEAD_TYPES, pattern_entropy, pattern_head_scores
from cutaway.model import Transformer, build

TINY = [name for name in ct.presets() if name.startswith("tiny-")]


def text_for(config: c.Config, seed: int = 0, length: int = 9) -> dict[str, Any]:
    """A text, and a source beside it where the model reads one."""
    given: dict[str, Any] = {"tokens": random_tokens(config, 1, length, seed)}
    if config.form == "encoder-decoder":
        given["source"] = random_tokens(config, 1, 5, seed + 1, "source")
    return given


def logits_of(model: Transformer, text: dict[str, Any]) -> torch.Tensor:
    both = [text["source"], text["tokens"]] if "source" in text else [text["tokens"]]
    return model(*both).detach()[0]


def is_sum(config: c.Config) -> bool:
    stack = getattr(config, "decoder", None) or config.encoder
    return not isinstance(stack.placement, c.PostNorm) and config.head.transform is None


def check_sums(config: c.Config, seed: int) -> None:
    """However it is parted, Σ parts ≡ logit."""
    model, text = build_randomized_model(config, torch.float64, seed), text_for(config, seed)
    if not is_sum(config):
        with pytest.raises(InputError, match="no sum of parts"):
            direct_logit_attribution(model, **text)
        return
    logits = logits_of(model, text)
    cap = config.head.softcap or float("inf")
    uncapped = logits if config.head.softcap is None else cap * torch.atanh(logits / cap)
    at = 5
    bound = 1e-9 * max(1.0, float(uncapped[at].abs().max()))
    if config.head.softcap is not None:  # atanh of what is near the cap loses digits; the cap itself loses none
        bound = 1e-7 * max(1.0, float(uncapped[at].abs().max()))
    for by_head, by_token in ((False, False), (True, False), (False, True), (True, True)):
        how = {"position": at, "by_head": by_head, "by_token": by_token}
        one = direct_logit_attribution(model, **text, answer_token=3, **how)
        assert abs(float(one.values.sum() - uncapped[at, 3])) <= bound
        if cap != float("inf"):
            assert abs(float(cap * torch.tanh(one.values.sum() / cap) - logits[at, 3])) <= 1e-9 * cap
        two = direct_logit_attribution(model, **text, answer_token=3, incorrect_token=4, **how)
        assert abs(float(two.values.sum() - uncapped[at, 3] + uncapped[at, 4])) <= 2 * bound


@pytest.mark.parametrize("name", TINY)
def test_attributions_add_up_to_the_logit(name: str) -> None:
    check_sums(ct.config(name), 1)


@given(configs(), SEEDS)
def test_attributions_add_up_whatever_the_model(config: c.Config, seed: int) -> None:
    check_sums(config, seed)


def test_parts_are_what_they_are_called() -> None:
    """The last FFN's part by hand; heads are parts of their layer; nothing comes from tokens that cannot be seen."""
    config = ct.config("tiny-gpt")
    model, text = build_randomized_model(config, torch.float64), text_for(config)
    coarse = direct_logit_attribution(model, **text, answer_token=7, position=4)
    with ct.trace(model, "blocks.1.ffn.out", "blocks.1.resid_post", positions=4) as t:
        model(text["tokens"])
    x, out, norm = t["blocks.1.resid_post"][0, 0], t["blocks.1.ffn.out"][0, 0], model.decoder.final_norm
    part = (out - out.mean()) / (x.var(correction=0) + norm.eps).sqrt() * norm.weight @ model.head.matrix.weight[7]
    assert abs(float(coarse["1.ffn"]) - part.item()) < 1e-12
    heads = direct_logit_attribution(model, **text, answer_token=7, position=4, by_head=True)
    of_layer = [label for label in heads.labels[0] if label.startswith("1.attn.")]
    torch.testing.assert_close(heads[of_layer].values.sum(), coarse["1.attn"].values)
    spread = direct_logit_attribution(model, **text, answer_token=7, position=4, by_token=True)
    assert not spread.values[:, 5:].any()
    torch.testing.assert_close(spread.sum("token")["0.ffn"].values, coarse["0.ffn"].values)


@pytest.mark.parametrize("name", TINY)
def test_every_reading_of_every_form(name: str) -> None:
    """All answer, draw themselves, go into JSON, and leave the model as it was: mode, hooks and gradients."""
    config = ct.config(name)
    model, text = build_randomized_model(config).train(), text_for(config)
    found = [
        ask(model, **text) for ask in (resid_norms, update_norm_ratios, update_cosine_similarities, attention_entropy)
    ]
    if isinstance(config.head, c.LMHead):
        found += [ask(model, **text) for ask in (logit_lens, gradient_by_depth)]
        found.append(logit_lens(model, **text, token=3, unit="rank"))
    else:
        for ask in (logit_lens, gradient_by_depth):
            with pytest.raises(InputError, match="no head"):
                ask(model, **text)
    if config.form != "encoder-decoder":
        found.append(head_scores(model, repeat_len=8, batch_size=2))
    for reading in found:
        assert reading.values.isfinite().any(), reading.title
        assert json.loads(json.dumps(reading.to_dict(), allow_nan=False))["axes"] == list(reading.axes)
        assert reading.title in repr(reading)
        assert "<table>" in reading._repr_html_()
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_stream_by_depth_is_what_passed() -> None:
    """Lengths, sizes and cosines agree with each other: |x + out|² = |x|² · (1 + 2·r·cos + r²)."""
    model = build_randomized_model(ct.config("tiny-llama"), torch.float64)
    tokens = random_tokens(model.config, 1, 9, 3)
    norms, sizes, cosines = (
        ask(model, tokens) for ask in (resid_norms, update_norm_ratios, update_cosine_similarities)
    )
    grown = norms["embed"].values
    for row, sublayer in enumerate(sizes.labels[0]):
        r, cos = sizes.values[row], cosines.values[row]
        grown = grown * (1 + 2 * r * cos + r * r).sqrt()
        if sublayer.endswith(".ffn"):
            torch.testing.assert_close(grown, norms[sublayer.removesuffix(".ffn")].values)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-gemma", "tiny-bert", "tiny-t5"])
def test_the_last_row_of_the_logit_lens_is_the_model(name: str) -> None:
    config = ct.config(name)
    model, text = build_randomized_model(config, torch.float64), text_for(config)
    logits = logits_of(model, text)
    chances, best = logits.softmax(-1).max(-1)
    lens = logit_lens(model, **text)
    torch.testing.assert_close(lens[-1].values, chances)
    assert lens.annotations[-1].tolist() == [str(token) for token in best.tolist()]
    torch.testing.assert_close(logit_lens(model, **text, token=5, unit="logit")[-1].values, logits[:, 5])
    ranks = (logits > logits[:, 5:6]).sum(-1) + 1
    assert logit_lens(model, **text, token=5, unit="rank")[-1].values.tolist() == ranks.tolist()


def test_entropy_of_known_patterns() -> None:
    even = torch.full((1, 1, 4, 8), 1 / 8)
    assert float(pattern_entropy(even)) == pytest.approx(3.0)
    assert float(pattern_entropy(torch.eye(4)[None, None])) == 0.0
    assert float(pattern_entropy(torch.full((1, 1, 4, 2), 0.25))) == pytest.approx(1.5)  # half of it is the sink's


@pytest.mark.parametrize(("head_type", "back"), [("previous_token", 1), ("duplicate_token", 8), ("induction", 7)])
def test_a_head_of_one_type_is_known(head_type: str, back: int) -> None:
    """A head that always looks so far back scores 1 for its own type and 0 for the others."""
    pattern = torch.zeros(2, 1, 16, 16)
    for row in range(16):
        pattern[:, :, row, max(row - back, 0)] = 1.0
    scores = dict(zip(HEAD_TYPES, (float(score) for score in pattern_head_scores(pattern, 8)), strict=True))
    assert scores.pop(head_type) == 1.0
    assert scores == dict.fromkeys(scores, 0.0)


def test_a_head_that_rests_on_the_first_token_is_known() -> None:
    pattern = torch.zeros(1, 1, 16, 16)
    pattern[..., 0] = 1.0
    assert float(pattern_head_scores(pattern, 8)[HEAD_TYPES.index("first_token")]) == 1.0


def test_the_shipped_model_has_induction_heads() -> None:
    """Some heads find what came after the token's first time many times as often as chance would; others do not."""
    kinds = head_scores(ct.load("tiny-python", dtype=torch.float32))
    induction = kinds.select(head_type="induction")
    (best, score), *_ = induction.top(1)
    assert best == ("4", "5")
    assert score > 0.15 > 5 * float(induction.values.median())
    assert kinds.select(head_type="previous_token").top(1)[0][0] == ("2", "7")


def test_neurons() -> None:
    """A neuron that reads one token and writes another is found by its key and its value."""
    config = ct.config("tiny-llama")
    model = build_randomized_model(config, torch.float64)
    f, matrix = model.decoder.blocks[2].ffn.f, model.head.matrix.weight
    tokens = random_tokens(config, 1, 9, 2)
    with torch.no_grad(), ct.trace(model, "blocks.2.ffn.in") as t:
        model(tokens)
        f.gate.weight[5] = f.up.weight[5] = 9 * t["blocks.2.ffn.in"][0, 6]
        f.down.weight[:, 5] = matrix[11] / model.decoder.final_norm.weight
    keys = neuron_activations(model, tokens, 2, 5)
    assert int(keys.values.argmax()) == 6
    values = neuron_logit_effects(model, -2, 5, top_k=3)
    assert values.labels[0][0] == "11"
    assert list(values.values) == sorted(values.values, reverse=True)
    with pytest.raises(InputError, match="experts"):
        neuron_activations(build("tiny-moe", seed=0), tokens, -1, 5)


def test_gradients_by_depth_are_autograds() -> None:
    model = build_randomized_model(ct.config("tiny-gpt"), torch.float64)
    tokens = random_tokens(model.config, 1, 7, 1)
    reading = gradient_by_depth(model.requires_grad_(False), tokens)
    kept = []
    handle = model.decoder.blocks[0].register_forward_hook(lambda m, a, out: kept.append(out.requires_grad_()))
    loss = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
    handle.remove()
    (slope,) = torch.autograd.grad(loss, kept)
    torch.testing.assert_close(reading["0"].values, slope.norm())


def test_gradients_by_placement() -> None:
    reading = gradient_by_placement("tiny-gpt", depths=(1, 3), num_seeds=1, seq_len=8)
    assert reading.shape == (2, 3, 2)
    assert reading.values[:, 2, 1].tolist() == [1.0, 1.0]
    assert reading.values[:, 1:, 0].isnan().all()
    assert reading.to_dict()["values"][0][1][0] is None


def test_likeness_of_positions() -> None:
    rope = position_similarity(build_randomized_model(ct.config("tiny-llama"), torch.float64), 3, seq_len=6).values
    torch.testing.assert_close(rope.diagonal(), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(rope[1:, 1:], rope[:-1, :-1])  # only the distance matters
    model = build_randomized_model(ct.config("tiny-gpt"), torch.float64)
    table = model.decoder.embed.position.table.weight
    learned = position_similarity(model, 3, seq_len=6).values
    torch.testing.assert_close(learned[1, 4], F.cosine_similarity(table[1], table[4], dim=0))


def small() -> LabeledTensor:
    values = torch.tensor([[1.0, -2.0, 0.5], [0.0, float("nan"), 3.0]])
    return LabeledTensor("a title", values, ("layer", "token"), (("0", "1"), (" a", "<b>", " a")), "logit", "a note")


def test_a_reading_is_indexed_by_labels() -> None:
    reading = small()
    assert float(reading["1", 2]) == 3.0
    assert float(reading.select(token="<b>", layer="0")) == -2.0
    assert reading["0"].shape == (3,)
    assert reading[:, [0, 2]].labels[1] == (" a", " a")
    assert reading[:, "<b>"].title == "a title, token <b>"
    assert reading.sum("token").values.tolist() == [-0.5, 3.0]
    assert reading.top(2) == [(("1", " a"), 3.0), (("0", "<b>"), -2.0)]
    for wrong, said in ((("0", " a"), "2 times"), ("7", "not on"), (2, "2 places"), ((0, 0, 0), "3 places")):
        with pytest.raises(InputError, match=said):
            reading[wrong]
    with pytest.raises(InputError, match="no axis 'head'"):
        reading.select(head=0)


def test_a_reading_shows_itself() -> None:
    reading = small()
    assert all(part in repr(reading) for part in ("a title (logit)", "·a", "-2", "a note"))
    assert "<th>&lt;b&gt;</th>" in reading._repr_html_()
    assert reading.to_dict()["values"][1] == [0.0, None, 3.0]
    for drawn in (reading, reading["0"], head_scores(build("tiny-gpt", seed=0), repeat_len=4, batch_size=1)):
        assert drawn.plot().axes
    with pytest.raises(InputError, match="0 axes"):
        reading[0, 0].plot()
    from matplotlib import pyplot

    assert not pyplot.get_fignums()


def test_texts_in_and_out() -> None:
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    lens = logit_lens(checkpoint, "import os\nimport", token=" os")
    assert "".join(lens.labels[1]).endswith("import os\nimport")
    reading = direct_logit_attribution(checkpoint, "for name in sorted(os.", incorrect_token="name")
    assert reading.title == "what put 'list' before 'name' after '.'"
    assert checkpoint.model.training is False


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda model: logit_lens(model, "text"), "no tokenizer"),
        (lambda model: logit_lens(model, torch.zeros(2, 3, dtype=torch.long)), "one text"),
        (lambda model: logit_lens(model, [1, 2], source=[1]), "no source"),
        (lambda model: logit_lens(model, [1, 2], unit="rank"), "always 1"),
        (lambda model: direct_logit_attribution(model, [1, 2], answer_token=999), "ids 0 to"),
        (lambda model: direct_logit_attribution(model, [1, 2], position=2), "2 tokens"),
        (lambda model: head_scores(model, repeat_len=2), "repeat_len is 2"),
        (lambda model: gradient_by_depth(model, [1]), "at least two"),
        (lambda model: neuron_activations(model, [1, 2], 0, 10**6), "neuron holds"),
        (lambda model: resid_norms(build("tiny-t5", seed=0), [1, 2]), "pass source"),
    ],
)
def test_what_cannot_be_read_is_said(ask: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        ask(build("tiny-gpt", seed=0))


def test_what_came_from_the_source_is_told_apart() -> None:
    """Cross-attention's parts stand at the source's tokens, and nothing else does."""
    config = ct.config("tiny-t5")
    spread = direct_logit_attribution(build_randomized_model(config, torch.float64), **text_for(config), by_token=True)
    beside = [at for at, label in enumerate(spread.labels[1]) if label.startswith("source: ")]
    assert len(beside) == 5
    for row, part in enumerate(spread.labels[0]):
        assert bool(spread.values[row, beside].any()) == part.endswith(".cross")
