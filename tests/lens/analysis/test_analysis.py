"""Analyses: contributions sum to the logit, results equal direct computation, and planted structure is found."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from matplotlib import pyplot
from support.config_strategies import SEEDS, build_randomized_model, configs, has_additive_residual, random_tokens

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
from cutaway.lens.analysis.gradients import relative_gradient_norms
from cutaway.model import Transformer, build

TINY = [name for name in ct.presets() if name.startswith("tiny-")]


def random_text(config: c.Config, seed: int = 0, length: int = 9) -> dict[str, Any]:
    """Return tokens, and a source for an encoder-decoder, as keyword arguments."""
    text: dict[str, Any] = {"tokens": random_tokens(config, 1, length, seed)}
    if config.form == "encoder-decoder":
        text["source"] = random_tokens(config, 1, 5, seed + 1, "source")
    return text


def compute_logits(model: Transformer, text: dict[str, Any]) -> torch.Tensor:
    args = [text["source"], text["tokens"]] if "source" in text else [text["tokens"]]
    return model(*args).detach()[0]


def is_attributable(config: c.Config) -> bool:
    stack = getattr(config, "decoder", None) or config.encoder
    return has_additive_residual(stack) and config.head.transform is None


def check_contributions_sum_to_logit(config: c.Config, seed: int) -> None:
    """With and without `by_head`, `by_token` and `by_expert`."""
    model, text = build_randomized_model(config, torch.float64, seed), random_text(config, seed)
    if not is_attributable(config):
        with pytest.raises(InputError, match=r"not a sum of|needs a linear head"):
            direct_logit_attribution(model, **text)
        return
    logits = compute_logits(model, text)
    cap = config.head.softcap or float("inf")
    uncapped = logits if config.head.softcap is None else cap * torch.atanh(logits / cap)
    position = 5
    tolerance = 1e-9 * max(1.0, float(uncapped[position].abs().max()))
    if config.head.softcap is not None:  # atanh loses digits near the softcap; tanh does not
        tolerance = 1e-7 * max(1.0, float(uncapped[position].abs().max()))
    for by_head, by_token in ((False, False), (True, False), (False, True), (True, True)):
        options = {"position": position, "by_head": by_head, "by_token": by_token, "by_expert": by_head}
        logit = direct_logit_attribution(model, **text, answer_token=3, **options)
        assert abs(float(logit.values.sum() - uncapped[position, 3])) <= tolerance
        if cap != float("inf"):
            assert abs(float(cap * torch.tanh(logit.values.sum() / cap) - logits[position, 3])) <= 1e-9 * cap
        difference = direct_logit_attribution(model, **text, answer_token=3, incorrect_token=4, **options)
        expected = uncapped[position, 3] - uncapped[position, 4]
        assert abs(float(difference.values.sum() - expected)) <= 2 * tolerance


@pytest.mark.parametrize("name", TINY)
def test_logit_contributions_sum_to_the_logit(name: str) -> None:
    check_contributions_sum_to_logit(ct.config(name), 1)


@given(configs(), SEEDS)
def test_logit_contributions_sum_for_random_configs(config: c.Config, seed: int) -> None:
    check_contributions_sum_to_logit(config, seed)


def test_logit_contributions_of_components() -> None:
    """The last FFN's contribution equals the formula, heads sum to their layer, and masked tokens contribute 0."""
    config = ct.config("tiny-gpt")
    model, text = build_randomized_model(config, torch.float64), random_text(config)
    by_sublayer = direct_logit_attribution(model, **text, answer_token=7, position=4)
    with ct.trace(model, "blocks.1.ffn.out", "blocks.1.resid_post", positions=4) as t:
        model(text["tokens"])
    x, out, norm = t["blocks.1.resid_post"][0, 0], t["blocks.1.ffn.out"][0, 0], model.decoder.final_norm
    expected = (out - out.mean()) / (x.var(correction=0) + norm.eps).sqrt() * norm.weight @ model.head.matrix.weight[7]
    assert abs(float(by_sublayer["1.ffn"]) - expected.item()) < 1e-12
    by_head = direct_logit_attribution(model, **text, answer_token=7, position=4, by_head=True)
    layer_heads = [label for label in by_head.labels[0] if label.startswith("1.attn.")]
    torch.testing.assert_close(by_head[layer_heads].values.sum(), by_sublayer["1.attn"].values)
    by_token = direct_logit_attribution(model, **text, answer_token=7, position=4, by_token=True)
    assert not by_token.values[:, 5:].any()
    torch.testing.assert_close(by_token.sum("token")["0.ffn"].values, by_sublayer["0.ffn"].values)


def test_experts_sum_to_their_sublayer() -> None:
    config = ct.config("tiny-moe")
    model, text = build_randomized_model(config, torch.float64), random_text(config)
    by_sublayer = direct_logit_attribution(model, **text, answer_token=7, position=4)
    by_expert = direct_logit_attribution(model, **text, answer_token=7, position=4, by_expert=True)
    for layer, block in enumerate(model.decoder.blocks):
        labels = [label for label in by_expert.labels[0] if label.startswith(f"{layer}.ffn.")]
        with ct.trace(model, f"blocks.{layer}.ffn.in", positions=4) as t:
            model(text["tokens"])
        selected = block.ffn.f.router(t[f"blocks.{layer}.ffn.in"][0])[1][0].tolist()
        assert {f"{layer}.ffn.{expert}" for expert in selected} <= set(labels)
        torch.testing.assert_close(by_expert[labels].values.sum(), by_sublayer[f"{layer}.ffn"].values)


@pytest.mark.parametrize("name", TINY)
def test_every_analysis_of_every_form(name: str) -> None:
    """Values, repr, HTML and JSON; training mode, hooks and gradients of the model are unchanged."""
    config = ct.config(name)
    model, text = build_randomized_model(config).train(), random_text(config)
    results = [
        analysis(model, **text)
        for analysis in (resid_norms, update_norm_ratios, update_cosine_similarities, attention_entropy)
    ]
    if isinstance(config.head, c.LMHead):
        results += [analysis(model, **text) for analysis in (logit_lens, gradient_by_depth)]
        results.append(logit_lens(model, **text, token=3, unit="rank"))
    else:
        for analysis in (logit_lens, gradient_by_depth):
            with pytest.raises(InputError, match="no language modeling head"):
                analysis(model, **text)
    if config.form != "encoder-decoder":
        results.append(head_scores(model, repeat_len=8, batch_size=2))
    for result in results:
        assert result.values.isfinite().any(), result.title
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["axes"] == list(result.axes)
        assert result.title in repr(result)
        assert "<table>" in result._repr_html_()
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_residual_stream_norms_ratios_and_cosines_are_consistent() -> None:
    """Norms, norm ratios r and cosines are consistent: |x + out|² = |x|² · (1 + 2·r·cos + r²)."""
    model = build_randomized_model(ct.config("tiny-llama"), torch.float64)
    tokens = random_tokens(model.config, 1, 9, 3)
    norms, ratios, cosines = (
        analysis(model, tokens) for analysis in (resid_norms, update_norm_ratios, update_cosine_similarities)
    )
    norm = norms["embed"].values
    for row, sublayer in enumerate(ratios.labels[0]):
        r, cos = ratios.values[row], cosines.values[row]
        norm = norm * (1 + 2 * r * cos + r * r).sqrt()
        if sublayer.endswith(".ffn"):
            torch.testing.assert_close(norm, norms[sublayer.removesuffix(".ffn")].values)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-gemma", "tiny-bert", "tiny-t5"])
def test_last_row_of_the_logit_lens_is_the_model_output(name: str) -> None:
    config = ct.config(name)
    model, text = build_randomized_model(config, torch.float64), random_text(config)
    logits = compute_logits(model, text)
    probs, top_ids = logits.softmax(-1).max(-1)
    lens = logit_lens(model, **text)
    torch.testing.assert_close(lens[-1].values, probs)
    assert lens.annotations[-1].tolist() == [str(token) for token in top_ids.tolist()]
    torch.testing.assert_close(logit_lens(model, **text, token=5, unit="logit")[-1].values, logits[:, 5])
    ranks = (logits > logits[:, 5:6]).sum(-1) + 1
    assert logit_lens(model, **text, token=5, unit="rank")[-1].values.tolist() == ranks.tolist()


def test_entropy_of_known_patterns() -> None:
    uniform = torch.full((1, 1, 4, 8), 1 / 8)
    assert float(pattern_entropy(uniform)) == pytest.approx(3.0)
    assert float(pattern_entropy(torch.eye(4)[None, None])) == 0.0
    assert float(pattern_entropy(torch.full((1, 1, 4, 2), 0.25))) == pytest.approx(
        1.5
    )  # half of the mass is in the sink


@pytest.mark.parametrize(("head_type", "offset"), [("previous_token", 1), ("duplicate_token", 8), ("induction", 7)])
def test_head_of_one_type_scores_1(head_type: str, offset: int) -> None:
    """A head that always attends `offset` tokens back scores 1 for its own type and 0 for the others."""
    pattern = torch.zeros(2, 1, 16, 16)
    for row in range(16):
        pattern[:, :, row, max(row - offset, 0)] = 1.0
    scores = dict(zip(HEAD_TYPES, (float(score) for score in pattern_head_scores(pattern, 8)), strict=True))
    assert scores.pop(head_type) == 1.0
    assert scores == dict.fromkeys(scores, 0.0)


def test_first_token_head_scores_1() -> None:
    pattern = torch.zeros(1, 1, 16, 16)
    pattern[..., 0] = 1.0
    assert float(pattern_head_scores(pattern, 8)[HEAD_TYPES.index("first_token")]) == 1.0


def test_pretrained_model_has_induction_heads() -> None:
    """Some heads have an induction score many times the median."""
    scores = head_scores(ct.load("tiny-english", dtype=torch.float32))
    induction = scores.select(head_type="induction")
    (head, score), *_ = induction.top(1)
    assert head == ("3", "3")
    assert score > 0.4 > 5 * float(induction.values.median())
    assert scores.select(head_type="previous_token").top(1)[0][0] == ("2", "7")


def test_neuron_activations_and_logit_effects() -> None:
    """A neuron that is set to read one token and write another has the largest activation and effect there."""
    config = ct.config("tiny-llama")
    model = build_randomized_model(config, torch.float64)
    f, matrix = model.decoder.blocks[2].ffn.f, model.head.matrix.weight
    tokens = random_tokens(config, 1, 9, 2)
    with torch.no_grad(), ct.trace(model, "blocks.2.ffn.in") as t:
        model(tokens)
        f.gate.weight[5] = f.up.weight[5] = 9 * t["blocks.2.ffn.in"][0, 6]
        f.down.weight[:, 5] = matrix[11] / model.decoder.final_norm.weight
    activations = neuron_activations(model, tokens, 2, 5)
    assert int(activations.values.argmax()) == 6
    effects = neuron_logit_effects(model, -2, 5, top_k=3)
    assert effects.labels[0][0] == "11"
    assert list(effects.values) == sorted(effects.values, reverse=True)
    with pytest.raises(InputError, match="experts"):
        neuron_activations(build("tiny-moe", seed=0), tokens, -1, 5)


def test_gradient_by_depth_equals_autograd() -> None:
    model = build_randomized_model(ct.config("tiny-gpt"), torch.float64)
    tokens = random_tokens(model.config, 1, 7, 1)
    result = gradient_by_depth(model.requires_grad_(False), tokens)
    outputs = []
    handle = model.decoder.blocks[0].register_forward_hook(lambda m, a, out: outputs.append(out.requires_grad_()))
    loss = F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
    handle.remove()
    (grad,) = torch.autograd.grad(loss, outputs)
    torch.testing.assert_close(result["0"].values, grad.norm())


def test_gradient_by_placement() -> None:
    result = gradient_by_placement("tiny-gpt", depths=(1, 3), num_seeds=1, seq_len=8)
    assert result.shape == (4, 3, 2)
    assert result.values[:, 2, 1].tolist() == [1.0] * 4
    assert result.values[:, 1:, 0].isnan().all()
    assert result.to_dict()["values"][0][1][0] is None


def test_relative_gradient_norms_equal_gradient_by_depth() -> None:
    """The texts of one batch have the gradients of separate texts."""
    model = build_randomized_model(ct.config("tiny-gpt"), torch.float64)
    texts = torch.randint(model.config.vocab_size, (2, 3, 8), generator=torch.Generator().manual_seed(5))[0]
    norms = torch.stack([gradient_by_depth(model, text[None]).values[1:] for text in texts])
    expected = (norms / norms[:, -1:]).log().mean(0).exp()
    torch.testing.assert_close(relative_gradient_norms(model, 8, 5, num_texts=3), expected)


def test_position_similarity() -> None:
    rope = position_similarity(build_randomized_model(ct.config("tiny-llama"), torch.float64), 3, seq_len=6).values
    torch.testing.assert_close(rope.diagonal(), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(rope[1:, 1:], rope[:-1, :-1])  # depends only on the distance
    model = build_randomized_model(ct.config("tiny-gpt"), torch.float64)
    table = model.decoder.embed.position.table.weight
    learned = position_similarity(model, 3, seq_len=6).values
    torch.testing.assert_close(learned[1, 4], F.cosine_similarity(table[1], table[4], dim=0))


def small_tensor() -> LabeledTensor:
    values = torch.tensor([[1.0, -2.0, 0.5], [0.0, float("nan"), 3.0]])
    return LabeledTensor("a title", values, ("layer", "token"), (("0", "1"), (" a", "<b>", " a")), "logit", "a note")


def test_labeled_tensor_is_indexed_by_labels() -> None:
    result = small_tensor()
    assert float(result["1", 2]) == 3.0
    assert float(result.select(token="<b>", layer="0")) == -2.0
    assert result["0"].shape == (3,)
    assert result[:, [0, 2]].labels[1] == (" a", " a")
    assert result[:, "<b>"].title == "a title, token <b>"
    assert result.sum("token").values.tolist() == [-0.5, 3.0]
    assert result.top(2) == [(("1", " a"), 3.0), (("0", "<b>"), -2.0)]
    for key, message in (
        (("0", " a"), "occurs 2 times"),
        ("7", "not a label"),
        (2, "2 is not an index"),
        ((0, 0, 0), "3 indices for 2 axes"),
    ):
        with pytest.raises(InputError, match=message):
            result[key]
    with pytest.raises(InputError, match="no axis 'head'"):
        result.select(head=0)


def test_labeled_tensor_display() -> None:
    result, opened_before = small_tensor(), pyplot.get_fignums()
    assert all(part in repr(result) for part in ("a title (logit)", "·a", "-2", "a note"))
    assert "<th>&lt;b&gt;</th>" in result._repr_html_()
    assert result.to_dict()["values"][1] == [0.0, None, 3.0]
    for plotted in (result, result["0"], head_scores(build("tiny-gpt", seed=0), repeat_len=4, batch_size=1)):
        assert plotted.plot().axes
    with pytest.raises(InputError, match="0 axes"):
        result[0, 0].plot()
    assert pyplot.get_fignums() == opened_before


def test_text_inputs_and_labels() -> None:
    checkpoint = ct.load("tiny-python", dtype=torch.float32)
    lens = logit_lens(checkpoint, "import os\nimport", token=" os")
    assert "".join(lens.labels[1]).endswith("import os\nimport")
    result = direct_logit_attribution(checkpoint, "for name in sorted(os.", incorrect_token="name")
    assert result.title == "direct logit attribution of 'list' − 'name' after '.'"
    assert checkpoint.model.training is False


@pytest.mark.parametrize(
    ("analyze", "message"),
    [
        (lambda model: logit_lens(model, "text"), "no tokenizer"),
        (lambda model: logit_lens(model, torch.zeros(2, 3, dtype=torch.long)), "one text"),
        (lambda model: logit_lens(model, [1, 2], source=[1]), "leave source out"),
        (lambda model: logit_lens(model, [1, 2], unit="rank"), "always has rank 1"),
        (lambda model: direct_logit_attribution(model, [1, 2], answer_token=999), "token id from 0 to"),
        (lambda model: direct_logit_attribution(model, [1, 2], position=2), "2 tokens"),
        (lambda model: head_scores(model, repeat_len=2), "repeat_len is 2"),
        (lambda model: gradient_by_depth(model, [1]), "at least two tokens"),
        (lambda model: neuron_activations(model, [1, 2], 0, 10**6), "neuron contains"),
        (lambda model: resid_norms(build("tiny-t5", seed=0), [1, 2]), "pass source"),
    ],
)
def test_invalid_arguments_are_errors(analyze: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        analyze(build("tiny-gpt", seed=0))


def test_source_contributions_are_separate() -> None:
    """Only cross-attention contributes at the source's tokens."""
    config = ct.config("tiny-t5")
    model = build_randomized_model(config, torch.float64)
    result = direct_logit_attribution(model, **random_text(config), by_token=True)
    source_columns = [column for column, label in enumerate(result.labels[1]) if label.startswith("source: ")]
    assert len(source_columns) == 5
    for row, component in enumerate(result.labels[0]):
        assert bool(result.values[row, source_columns].any()) == component.endswith(".cross")
