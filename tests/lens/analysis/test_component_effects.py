"""Component effects: planted circuits are found, and each value equals a single edit."""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from support.config_strategies import SEEDS, build_randomized_model, configs, random_tokens, tolerance
from torch import Tensor

import cutaway as ct
from cutaway import config as c
from cutaway.errors import InputError
from cutaway.lens import edit, trace
from cutaway.lens.analysis import LabeledTensor, component_effects, logit_lens, pair_ablation
from cutaway.lens.analysis.component_effects import ablated_logits
from cutaway.lens.analysis.inputs import prepare_inputs
from cutaway.model import Transformer

MODULE = importlib.import_module("cutaway.lens.analysis.component_effects")
"""The module; the name `component_effects` of the package is the function."""
VOCAB, CONTEXT, D_HEAD, HIDDEN = 10, 8, 16, 4
TOKEN, POSITION, PREVIOUS, OUTPUT = slice(0, 10), slice(10, 18), slice(18, 28), slice(28, 38)
"""Parts of the residual stream: one-hot token, one-hot position, previous token, and logits of the next token."""
UNREAD, D_MODEL = 38, 40
DEFAULT_ANSWER, SHARPNESS = 9, 50.0


def build_empty_model(default_logit: float) -> Transformer:
    """A model of two blocks without norms whose sublayers output 0, with one-hot embeddings.

    Without edits of the weights, its answer is DEFAULT_ANSWER, with the logit `default_logit`.
    """
    ffn = {"kind": "mlp", "activation": "relu", "hidden": HIDDEN, "bias": False}
    stack = {
        "layers": 2,
        "norm": {"kind": "none"},
        "embedding": {"position": {"kind": "learned", "length": CONTEXT}},
        "block": {"attention": {"heads": 2, "d_head": D_HEAD, "scale": 1.0}, "ffn": ffn},
    }
    config = {"form": "decoder", "vocab_size": VOCAB, "d_model": D_MODEL, "head": {"tied": False}, "decoder": stack}
    model = ct.build(c.config(config), seed=0, dtype=torch.float64).requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    embed, identity = model.decoder.embed, torch.eye(VOCAB, dtype=torch.float64)
    embed.token.weight[:, TOKEN] = identity
    embed.token.weight[:, OUTPUT.start + DEFAULT_ANSWER] = default_logit
    embed.position.table.weight[:, POSITION] = torch.eye(CONTEXT, dtype=torch.float64)
    model.head.matrix.weight[:, OUTPUT] = identity
    return model


def add_neuron(model: Transformer, layer: int, neuron: int, reads: dict[int, float], writes: dict[int, float]) -> None:
    """Set a neuron's input weights and output weights, by dimension of the residual stream."""
    f = model.decoder.blocks[layer].ffn.f
    for dimension, weight in reads.items():
        f.up.weight[neuron, dimension] = weight
    for dimension, weight in writes.items():
        f.down.weight[dimension, neuron] = weight


def add_fact(model: Transformer, layer: int, neuron: int, subject: int, answer: int, logit: float = 5.0) -> None:
    add_neuron(model, layer, neuron, {subject: 1.0}, {OUTPUT.start + answer: logit})


def add_head(model: Transformer, layer: int, head: int, q: Tensor, k: Tensor, reads: slice, writes: slice) -> None:
    """Set a head that attends by q and k, (features, d_model), and copies one part of the stream to another."""
    f = model.decoder.blocks[layer].attn.f
    rows = slice(head * D_HEAD, head * D_HEAD + VOCAB)
    f.q.weight[rows][: len(q)], f.k.weight[rows][: len(k)] = SHARPNESS * q, k
    f.v.weight[rows, reads] = torch.eye(VOCAB, dtype=torch.float64)
    f.o.weight[writes, rows] = torch.eye(VOCAB, dtype=torch.float64)


def select(part: slice, shift: int = 0) -> Tensor:
    """(features, d_model): the matrix that reads a part of the residual stream, with its features shifted."""
    matrix = torch.zeros(part.stop - part.start, D_MODEL, dtype=torch.float64)
    matrix[:, part] = torch.eye(part.stop - part.start, dtype=torch.float64)
    return matrix.roll(shift, 0)


def build_induction_circuit() -> Transformer:
    """Head 1 of block 0 attends to the previous token; head 0 of block 1 attends to the token after a duplicate."""
    model = build_empty_model(default_logit=0.1)
    add_head(model, 0, 1, select(POSITION), select(POSITION, shift=1), TOKEN, PREVIOUS)
    add_head(model, 1, 0, select(TOKEN), select(PREVIOUS), TOKEN, OUTPUT)
    return model


def build_fact_model() -> Transformer:
    """3 → 7 and 4 → 8 in the FFN of block 1; the FFN of block 0 has a large output that nothing reads."""
    model = build_empty_model(default_logit=3.0)
    for neuron, (subject, answer) in enumerate([(3, 7), (4, 8)]):
        add_fact(model, 1, neuron, subject, answer)
        add_neuron(model, 0, neuron, {subject: 1.0}, {UNREAD: 100.0})
    return model


def build_redundant_model() -> Transformer:
    """The FFNs of both blocks write the answer, and one of them suffices."""
    model = build_empty_model(default_logit=3.0)
    for layer in range(2):
        add_fact(model, layer, 0, 3, 7)
        add_fact(model, layer, 1, 4, 8)
    return model


def build_backup_model() -> Transformer:
    """The FFN of block 0 writes the answer; the FFN of block 1 writes it only if it is not there yet."""
    model = build_empty_model(default_logit=3.0)
    for neuron, (subject, answer) in enumerate([(3, 7), (4, 8)]):
        add_fact(model, 0, neuron, subject, answer)
        read_answer = {OUTPUT.start + answer: -0.2}  # 1 − 0.2 · 5 = 0: inactive if block 0 wrote the answer
        add_neuron(model, 1, neuron, {subject: 1.0} | read_answer, {OUTPUT.start + answer: 5.0})
    return model


def named(result: LabeledTensor, metric: str) -> set[str]:
    """Names of the components whose value of a 0/1 metric is 1."""
    flags = result.select(metric=metric)
    return {name for name, flag in zip(flags.labels[0], flags.values.tolist(), strict=True) if flag}


INDUCTION_TEXT, OTHER_TEXT = [0, 1, 2, 3, 4, 1], [0, 1, 5, 3, 4, 1]


def test_both_heads_of_an_induction_circuit_are_necessary() -> None:
    """The induction head alone is sufficient: what it reads of the previous-token head is the same in both texts."""
    model = build_induction_circuit()
    result = component_effects(model, INDUCTION_TEXT, 2, corrupted=OTHER_TEXT)
    assert named(result, "necessary") == {"0.attn", "1.attn"}
    assert named(result, "sufficient") == {"1.attn"}
    assert float(result["1.attn", "recovered"]) == pytest.approx(1)
    assert result.values[[1, 3]].abs().max() == 0  # FFNs output 0
    heads = component_effects(model, INDUCTION_TEXT, corrupted=OTHER_TEXT, by_head=True)
    assert named(heads, "necessary") == {"0.attn.1", "1.attn.0"}
    assert named(heads, "sufficient") == {"1.attn.0"}


def test_token_positions_of_an_induction_circuit() -> None:
    """The previous token is needed at the token that is copied; the copy is needed at the last token."""
    result = component_effects(build_induction_circuit(), INDUCTION_TEXT, by_token=True).select(metric="necessary")
    assert result["0.attn"].values.tolist() == [0, 0, 1, 0, 0, 0]
    assert result["1.attn"].values.tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("ablation", ["zero", "mean", "resample"])
def test_fact_in_one_ffn_is_located(ablation: Any) -> None:
    """A large output that nothing reads has no effect."""
    reference = [[4], [5]] if ablation == "mean" else None
    result = component_effects(build_fact_model(), [3], 7, corrupted=[4], ablation=ablation, reference=reference)
    assert named(result, "necessary") == named(result, "sufficient") == {"1.ffn"}
    assert result[["0.attn", "0.ffn", "1.attn"]].values.abs().max() == 0
    change = {"zero": -5.0, "mean": -7.5, "resample": -10.0}[ablation]  # logit of 7 minus logit of 8
    assert float(result["1.ffn", "logit difference"]) == pytest.approx(change)


def test_redundant_components_are_only_jointly_necessary() -> None:
    """Either FFN suffices, so no single ablation changes the answer, although the logit lens shows it after block 0."""
    model = build_redundant_model()
    assert logit_lens(model, [3]).annotations[:, 0].tolist() == [str(DEFAULT_ANSWER), "7", "7"]
    single = component_effects(model, [3])
    assert not named(single, "necessary")
    assert "no single component is necessary" in single.note
    assert "pairs=True" in single.note
    result = component_effects(model, [3], corrupted=[4], pairs=True)
    assert named(result, "jointly necessary") == named(result, "sufficient") == {"0.ffn", "1.ffn"}
    assert "jointly necessary: 0.ffn, 1.ffn" in result.note
    pairs = pair_ablation(model, [3])
    assert float(pairs["0.ffn", "1.ffn", "necessary"]) == 1
    assert float(pairs["0.ffn", "1.ffn", "logit difference"]) == pytest.approx(-10)
    assert float(pairs["0.ffn", "1.ffn", "interaction"]) == pytest.approx(0)


def test_backup_component_compensates_for_an_ablation() -> None:
    """Single ablations change nothing at all; the interaction is negative, and only the first FFN is sufficient."""
    model = build_backup_model()
    result = component_effects(model, [3], corrupted=[4], pairs=True)
    assert result.select(metric="logit difference").values.abs().max() < 1e-12
    assert not named(result, "necessary")
    assert named(result, "jointly necessary") == {"0.ffn", "1.ffn"}
    assert named(result, "sufficient") == {"0.ffn"}
    pairs = pair_ablation(model, [3])
    assert float(pairs["0.ffn", "1.ffn", "interaction"]) == pytest.approx(-5)
    assert pairs.values[[0, 2]].abs().max() < 1e-12


CLEAN, CORRUPTED = torch.arange(3, 11)[None], torch.tensor([[3, 4, 90, 6, 7, 8, 9, 10]])


def logits_with(model: Transformer, tokens: Tensor, edits: Any) -> Tensor:
    with torch.no_grad(), edit(model, edits):
        return model(tokens)[0, 5]


def test_each_value_equals_a_single_edit() -> None:
    model = build_randomized_model(ct.config("tiny-llama"), torch.float64)
    with torch.no_grad():
        clean, corrupted = model(CLEAN)[0, 5], model(CORRUPTED)[0, 5]
    answer, other = int(clean.argmax()), int(corrupted.argmax())
    assert answer != other

    def difference(logits: Tensor) -> float:
        return float(logits[answer] - logits[other])

    for by_head, name, site in ((False, "2.ffn", "blocks.2.ffn.out"), (True, "1.attn.3", "blocks.1.attn.z")):
        heads = {"heads": [3]} if by_head else {}
        recorded = []
        for tokens in (CLEAN, CORRUPTED):
            with torch.no_grad(), trace(model, site) as t:
                model(tokens)
            recorded.append(t[site].as_subclass(Tensor)[:, :, 3:4] if by_head else t[site].as_subclass(Tensor))
        edits = {
            "zero": {"do": "zero", **heads},
            "mean": {"do": "mean", **heads},
            "resample": {"do": "replace", "value": recorded[1], **heads},
        }
        for method, spec in edits.items():
            result = component_effects(model, CLEAN, position=5, corrupted=CORRUPTED, ablation=method, by_head=by_head)[
                name
            ]
            logits = logits_with(model, CLEAN, {site: spec})
            assert float(result["logit difference"]) == pytest.approx(difference(logits) - difference(clean), abs=1e-9)
            probability = logits.softmax(-1)[answer] - clean.softmax(-1)[answer]
            assert float(result["probability"]) == pytest.approx(float(probability), abs=1e-9)
            assert bool(result["necessary"].values) == (int(logits.argmax()) != answer)
        patched = logits_with(model, CORRUPTED, {site: {"do": "replace", "value": recorded[0], **heads}})
        fraction = (difference(patched) - difference(corrupted)) / (difference(clean) - difference(corrupted))
        assert float(result["recovered"]) == pytest.approx(fraction, abs=1e-9)
        assert bool(result["sufficient"].values) == (int(patched.argmax()) == answer)


@given(config=configs(), seed=SEEDS)
def test_a_batch_that_starts_at_a_later_block_equals_edits_of_the_whole_model(config: c.Config, seed: int) -> None:
    model, tokens = build_randomized_model(config, torch.float64, seed), random_tokens(config, 1, 4, seed)
    source = random_tokens(config, 1, 5, seed, "source") if config.form == "encoder-decoder" else None
    inputs = prepare_inputs(model, tokens, source)
    with mock.patch.object(MODULE, "_CPU_BATCH_TOKENS", 4):  # one intervention per batch
        logits = ablated_logits(inputs, 2, "mean")
    for name, values in logits.items():
        with edit(model, {f"{inputs.site_prefix}blocks.{name}.out": "mean"}):
            expected = inputs.logits_at(2)[0]
        assert (values - expected).abs().max() < tolerance(torch.float64, expected)


def test_pair_equals_two_edits() -> None:
    model = build_randomized_model(ct.config("tiny-gpt"), torch.float64)
    result = pair_ablation(model, CLEAN, incorrect_token=5, position=5)
    with torch.no_grad():
        clean = model(CLEAN)[0, 5]
    logits = logits_with(model, CLEAN, {"blocks.0.ffn.out": "zero", "blocks.1.attn.out": "zero"})
    answer = int(clean.argmax())
    change = (logits[answer] - logits[5]) - (clean[answer] - clean[5])
    assert float(result["0.ffn", "1.attn", "logit difference"]) == pytest.approx(float(change), abs=1e-9)
    torch.testing.assert_close(result.values, result.values.transpose(0, 1))


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-moe", "tiny-mla", "tiny-t5"])
def test_other_architectures(name: str) -> None:
    """Encoder, mixture of experts, latent attention; the decoder of an encoder-decoder also has cross-attention."""
    config = ct.config(name)
    model = build_randomized_model(config, torch.float64)
    source = {"source": random_tokens(config, 1, 5, 1, "source")} if config.form == "encoder-decoder" else {}
    result = component_effects(model, random_tokens(config, 1, 7, 0), **source, position=3, pairs=True)
    assert result.values.isfinite().all()
    assert ("0.cross" in result.labels[0]) == bool(source)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_invalid_experiments_are_errors() -> None:
    model = build_fact_model()
    for kwargs, message in (
        ({"answer_token": 2}, "the top-1 token is '7'"),
        ({"incorrect_token": 7}, "is the answer"),
        ({"corrupted": [3]}, "same top-1 token"),
        ({"corrupted": [3, 4]}, "equal length"),
        ({"ablation": "resample"}, "pass it as corrupted"),
        ({"ablation": "drop"}, "use one of zero, mean, resample"),
        ({"reference": [[4]]}, "leave reference out"),
        ({"ablation": "mean", "reference": []}, "reference is empty"),
        ({"pairs": True, "by_token": True}, "leave one of them out"),
        ({"corrupted_source": [1]}, "without corrupted"),
    ):
        with pytest.raises(InputError, match=message):
            component_effects(model, [3], **kwargs)
