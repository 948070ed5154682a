"""Study of representation: small versions, and equality of its measurements with direct computation."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cutaway.evaluate.functional import kl_divergence_from_logits
from cutaway.learn.studies import get_study
from cutaway.learn.studies.rank_correlation import spearman
from cutaway.learn.studies.representation import PARTS, list_parts
from cutaway.learn.studies.representation.answers import logit_lens_sublayer, measure_logit_lens_cause
from cutaway.learn.studies.representation.attention_weights import measure_edges
from cutaway.learn.studies.representation.facts import FactModel, FactTable, ablate_neurons, fact_config
from cutaway.learn.studies.representation.heads import attention_targets, composition_scores
from cutaway.learn.studies.representation.probes import NUM_LABELS, ProbeData, train_probes
from cutaway.learn.studies.representation.python_texts import PROMPTS, TOKEN_CLASSES, load_model, tokenize_source
from cutaway.learn.studies.representation.superposition import loss_without_superposition, train_toy_models
from cutaway.learn.studies.representation.two_targets import GRID, LayerConfig, train_layers
from cutaway.lens import edit
from cutaway.model import build


def encode(prompt: str) -> Tensor:
    return torch.tensor([load_model().tokenizer.encode(prompt)])


def test_study_is_registered() -> None:
    assert get_study("representation").module == list_parts.__module__
    assert len(PARTS) == len(set(PARTS))


def test_sparse_features_are_in_superposition_and_dense_ones_are_not() -> None:
    models = train_toy_models((0.0, 0.97), 1, 300, num_features=6, num_dims=2)
    dense, sparse = models.represented().sum(-1)[:, 0].tolist()
    assert dense <= 2 < sparse
    assert models.interference()[1] > models.interference()[0]
    assert loss_without_superposition(0.0, num_features=3, num_dims=1) == pytest.approx((0.9 + 0.81) / 12)


def test_properties_of_tokens() -> None:
    source = "def f(x):\n    return 'ab'  # c\n" * 64
    text = tokenize_source(source, max_windows=1)
    tokenizer = load_model().tokenizer
    found = {}
    for token, label, depth in zip(text.ids[0].tolist(), text.token_class[0].tolist(), text.indent[0], strict=True):
        found.setdefault(tokenizer.decode([token]).strip(" "), (TOKEN_CLASSES[label], int(depth)))
    assert found["def"] == ("keyword", 0)
    assert found["return"] == ("keyword", 1)
    assert found["(x"] == ("operator", 0)
    assert found["#"] == ("comment", 1)
    in_string = [tokenizer.decode([token]) for token in text.ids[0][text.in_string[0] == 1].tolist()]
    assert set("".join(in_string)) <= set(" 'ab")


def test_probe_finds_a_linear_label_and_nothing_in_shuffled_labels() -> None:
    """Depth 1 encodes the labels, depth 0 is noise."""
    generator = torch.Generator().manual_seed(0)
    count = 4000
    labels = {name: torch.randint(size, (count,), generator=generator) for name, size in NUM_LABELS.items()}
    noise = torch.randn(2, count, 32, generator=generator)
    encoded = torch.cat([torch.nn.functional.one_hot(label, NUM_LABELS[name]) for name, label in labels.items()], 1)
    noise[1, :, : encoded.shape[1]] += 8 * encoded
    data = ProbeData(noise, torch.randint(50, (count,), generator=generator), labels, torch.arange(count) // 1000)
    results = train_probes(data, seed=0, num_train_modules=2, steps=300, controls=True)
    for name, size in NUM_LABELS.items():
        assert results[name].entropy == pytest.approx(math.log2(size), abs=0.02)
        assert results[name].information[1] > 0.9 * math.log2(size)
        assert results[name].information[0] < 0.02
        assert max(results[f"{name}/shuffled"].information) < 0.02


def test_two_heads_reproduce_two_targets_and_one_head_does_not() -> None:
    """The loss of one head with fixed weights has the lower bound that the module derives."""
    grid = replace(GRID, lrs=(1e-2,), num_seeds=1, steps=120)
    one, two = (train_layers(LayerConfig(heads), grid, "cpu").losses[-20:].mean() for heads in (1, 2))
    assert two < 0.1 < (1 - 1 / 16) * math.log(2) / 2 < one


def test_removing_an_edge_equals_a_zero_in_the_pattern() -> None:
    model, ids = load_model().model, encode(PROMPTS[1])
    edges = measure_edges(model, ids)

    def zero_edge(pattern: Tensor) -> Tensor:
        pattern[:, 3, -1, 2] = 0
        return pattern

    def zero_key(pattern: Tensor) -> Tensor:
        pattern[:, :, -1, 2] = 0
        return pattern

    with torch.no_grad():
        logits = model(ids)[:, -1]
        with edit(model, {"blocks.4.attn.pattern": zero_edge}):
            without_edge = model(ids)[:, -1]
        with edit(model, {"blocks.*.attn.pattern": zero_key}):
            without_key = model(ids)[:, -1]
    expected = float(kl_divergence_from_logits(logits, without_edge))
    assert float(edges.effect[4, 3, 2]) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    expected = float(kl_divergence_from_logits(logits, without_key))
    assert float(edges.token_effect[2]) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    torch.testing.assert_close(edges.weight.sum(-1), torch.ones(6, 8))
    assert spearman(edges.weight, edges.weight.square()) == pytest.approx(1)


def test_attention_targets_of_a_known_pattern() -> None:
    """Head 0 attends to the previous token, head 1 to the first token, head 2 to punctuation."""
    length = 64
    ids = torch.zeros(1, length, dtype=torch.long)
    ids[0, 5] = 1
    pattern = torch.zeros(1, 1, 3, length, length)
    for query in range(1, length):
        pattern[0, 0, 0, query, query - 1] = 1
        pattern[0, 0, 1, query, 0] = 1
        pattern[0, 0, 2, query, min(query, 5)] = 1
    targets = attention_targets(pattern, ids, torch.tensor([False, True]))
    assert targets["offset-1"][0].tolist() == [1, 0, 0]
    assert targets["first"][0].tolist() == [0, 1, 0]
    assert float(targets["punctuation"][0, 2]) == pytest.approx(1)
    assert float(targets["punctuation"][0, 0]) < 0


def test_composition_scores_equal_the_formula() -> None:
    model = load_model().model
    scores = composition_scores(model)
    early, late = model.decoder.blocks[1].attn, model.decoder.blocks[3].attn
    ov, qk, ov_late = (torch.zeros(256, 256) for _ in range(3))
    with torch.no_grad():
        ov = early.f.o.weight[:, 64:96] @ (early.f.v.weight * early.norm_in.weight)[64:96]
        q, k, v = ((m.weight * late.norm_in.weight)[160:192] for m in (late.f.q, late.f.k, late.f.v))
        qk, ov_late = q.T @ k, late.f.o.weight[:, 160:192] @ v
    for name, matrix in (("q", qk.T), ("k", qk), ("v", ov_late)):
        expected = (matrix @ ov).norm() / (matrix.norm() * ov.norm())
        torch.testing.assert_close(scores[name][1, 2, 3, 5], expected, rtol=1e-3, atol=1e-5)
        assert scores[name][3, 0, 1, 0].isnan()


def test_samples_are_facts_of_the_same_seed() -> None:
    facts = FactTable().all_facts(3)
    by_key = {(int(subject), int(relation)): int(answer) for subject, relation, answer in facts}
    for subject, relation, answer in FactTable().sample(100, 3, torch.Generator().manual_seed(3)).tolist():
        assert by_key[subject, relation] == answer


def test_neurons_that_write_an_object_are_found() -> None:
    """A neuron of an untrained model that writes the objects of all facts with the largest weight is ablated."""
    model = build(fact_config(2), seed=0).eval().requires_grad_(False)
    facts = FactTable().all_facts(0)
    answer = int(facts[0, -1])
    facts = facts[facts[:, -1] == answer]
    f = model.decoder.blocks[1].ffn.f
    f.up.weight[7], f.up.bias[7] = 0, 1.0
    f.down.weight[:, 7] = 100 * model.head.matrix.weight[answer]
    fact_model = FactModel(model, facts)
    assert fact_model.accuracy() == 1
    row = ablate_neurons(fact_model, seed=0)
    assert row["neurons/own"] < 1
    assert row["neurons/own"] <= row["neurons/random"]


def test_sublayer_of_the_logit_lens_is_not_necessary() -> None:
    """The logit lens shows the answer of this prompt from 4.attn on, and the answer stays if 4.attn is ablated."""
    assert logit_lens_sublayer(load_model(), encode(PROMPTS[0])) == "4.attn"
    estimates = measure_logit_lens_cause("cpu", PROMPTS[:1], num_positions=0, prompt_methods=["zero"])
    assert estimates["logit-lens/necessary/prompts/zero"].mean == 0
    assert estimates["logit-lens/num-necessary/prompts/zero"].mean >= 1
