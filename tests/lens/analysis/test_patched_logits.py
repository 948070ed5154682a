"""Sweeps of patches: partial forward passes with a KV cache equal whole forward passes, and their cost is stated."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cutaway as ct
from cutaway.lens import edit, trace
from cutaway.lens.analysis import attention_knockout, head_ablation
from cutaway.lens.analysis.inputs import AnalysisInputs, prepare_inputs
from cutaway.lens.analysis.patched_logits import Patch, PatchSweep, resumed_sites

PRESETS = ("tiny-llama", "tiny-gpt", "tiny-moe", "tiny-mla", "tiny-gemma", "tiny-t5", "tiny-bert")


def prepare(name: str, num_tokens: int, seed: int) -> AnalysisInputs:
    model = ct.build(name, seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 60, (1, num_tokens), generator=generator)
    return prepare_inputs(model, tokens, tokens[:, :9] if len(model.stacks) > 1 else None)


def values(inputs: AnalysisInputs, names: list[str]) -> dict[str, Tensor]:
    t = inputs.trace(*dict.fromkeys(names))
    return {name: t[name].as_subclass(Tensor) for name in t}


@pytest.mark.parametrize("name", PRESETS)
def test_partial_forward_passes_equal_whole_ones(name: str) -> None:
    """40 tokens are more than one batch has rows for, so that later batches start at later tokens."""
    receiver, donor = prepare(name, 40, 1), prepare(name, 40, 2)
    donor = replace(donor, model=receiver.model)
    sites = [f"{receiver.site_prefix}blocks.{layer}.{site}" for layer in (0, 1) for site in ("resid_post", "attn.z")]
    patch_sets = [[Patch(site, ((t, t),))] for site in sites for t in range(0, 40, 3)]
    patch_sets += [[Patch(sites[1], ((5, 7), (20, 21)), head=1), Patch(sites[2], ((9, 9),))], []]
    receiver_values, donor_values = values(receiver, resumed_sites(receiver)), values(donor, sites)
    partial = PatchSweep(receiver, receiver_values, donor_values, patch_sets, 38)
    whole = PatchSweep(receiver, {}, donor_values, patch_sets, 38)
    whole.resumes_at_block = whole.resumes_at_token = False
    whole.batches = whole._plan_batches(patch_sets)
    assert name == "tiny-bert" or any(batch.first_token for batch in partial.batches)
    assert not any(batch.first_token for batch in whole.batches)
    results = [torch.cat([sweep.logits(batch) for batch in sweep.batches]) for sweep in (partial, whole)]
    assert results[0].shape == (len(patch_sets), receiver.structure.config.vocab_size)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)
    assert partial.num_forward_passes < 0.8 * whole.num_forward_passes == 0.8 * len(patch_sets)


def test_an_edit_around_a_knockout_keeps_its_positions() -> None:
    """With active edits no KV cache is used: in a pass over one token, position 1 would be another token."""
    inputs = prepare("tiny-llama", 8, 1)
    outer = {"blocks.0.resid_post": {"do": "zero", "positions": [1]}}
    with edit(inputs.model, outer):
        result = attention_knockout(inputs.model, inputs.tokens, 5, progress=False)
        with trace(inputs.model, "blocks.*.attn.pattern"):
            whole = attention_knockout(inputs.model, inputs.tokens, 5, progress=False)
    torch.testing.assert_close(result.values, whole.values, rtol=1e-9, atol=1e-12)
    plain = attention_knockout(inputs.model, inputs.tokens, 5, progress=False)
    assert (result.values[:, 0] - plain.values[:, 0]).abs().max() > 1e-6


def test_head_ablation_equals_single_edits() -> None:
    inputs = prepare("tiny-llama", 12, 1)
    result = head_ablation(inputs.model, inputs.tokens, progress=False)
    labels = inputs.tokens[0, 1:]
    with torch.no_grad():
        baseline = torch.nn.functional.cross_entropy(inputs.logits()[:-1], labels)
        for layer, head in ((0, 0), (2, 1), (3, 3)):
            with edit(inputs.model, {f"blocks.{layer}.attn.z": {"do": "zero", "heads": [head]}}):
                loss = torch.nn.functional.cross_entropy(inputs.logits()[:-1], labels)
            assert float(result[layer, head]) == pytest.approx(float(loss - baseline), abs=1e-6)


def test_the_cost_of_a_long_sweep_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = prepare("tiny-llama", 4, 1)
    names = resumed_sites(inputs)
    known = values(inputs, names)
    sweep = PatchSweep(inputs, known, known, [[Patch(names[2], ((t, t),))] for t in range(4)], -1 % 4)
    sweep.state_cost("activation patching of resid_pre", 0.001)
    assert capsys.readouterr().err == ""
    sweep.state_cost("activation patching of resid_pre", 30.0)
    # blocks 2 and 3 of four; one batch from the first token on
    expected = "4 patches; the computation of 2 forward passes, at most about 60 s\n"
    assert capsys.readouterr().err == f"activation patching of resid_pre: {expected}"
