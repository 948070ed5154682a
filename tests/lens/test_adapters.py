"""Models with adapters in trace, edit, analyses, checks and the inspector: equal to the merged model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runner import CliRunner
from torch import Tensor

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.lens import sites
from cutaway.lens.activations.index import describe_model
from cutaway.lens.analysis.attribution import direct_logit_attribution
from cutaway.model import Transformer
from cutaway.model.adapters.adapter_methods import describe_adapter
from cutaway.serve.inspect.inspector import build_inspector
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.model_info import ModelInfo
from cutaway.tokenizer import byte_tokenizer

TOKENS = torch.arange(3, 13).unsqueeze(0)


def build_adapted(preset: str = "tiny-llama", **config: Any) -> Transformer:
    """A model with an active adapter 'sql' and another one."""
    model = ct.build(preset, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name in ("other", "sql"):
        model.add_adapter({"rank": 4} | config, name, seed=0)
        for key, parameter in model.named_parameters():
            if f".adapters.{name}.lora" in key:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.requires_grad_(False).eval()


def run(model: Transformer) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS)
    return logits


@pytest.mark.parametrize(
    ("preset", "config"),
    [("tiny-llama", {}), ("tiny-llama", {"use_dora": True}), ("tiny-mla", {}), ("tiny-moe", {})],
    ids=["lora", "dora", "mla", "experts"],
)
def test_traced_values_equal_those_of_the_merged_model(preset: str, config: dict[str, Any]) -> None:
    model = build_adapted(preset, **config)
    merged = model.merge_and_unload()
    assert list(sites(model)) == list(sites(merged))
    values: list[dict[str, Tensor]] = []
    for each in (model, merged):
        with torch.no_grad(), ct.trace(each, "*") as t:
            each(TOKENS)
        values.append({name: t[name].float() for name in t if t[name].is_floating_point()})
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        torch.testing.assert_close(value, values[1][name], atol=2e-5, rtol=1e-4, msg=name)


def test_edits_of_adapted_layers_equal_those_of_the_merged_model() -> None:
    model = build_adapted()
    merged = model.merge_and_unload()
    before = run(model)
    for site in ("blocks.1.attn.q", "blocks.2.attn.out", "blocks.0.ffn.hidden"):
        edited = []
        for each in (model, merged):
            with ct.edit(each, {site: lambda value: value * 0.5}):
                edited.append(run(each))
        torch.testing.assert_close(edited[0], edited[1], atol=1e-5, rtol=1e-4)
        assert float((edited[0] - before).abs().max()) > 1e-4, site
    torch.testing.assert_close(run(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("use_dora", [False, True])
def test_analyses_of_weights_read_the_adapted_weights(use_dora: bool) -> None:
    """Contributions of heads are z times the output matrix: with the adapter, they add up to the logits."""
    model = build_adapted(use_dora=use_dora)
    merged = model.merge_and_unload()
    attributions = [direct_logit_attribution(each, TOKENS, 5, by_head=True) for each in (model, merged)]
    torch.testing.assert_close(attributions[0].values, attributions[1].values, atol=1e-5, rtol=1e-4)
    with model.disable_adapters():
        base = direct_logit_attribution(model, TOKENS, 5, by_head=True)
    assert float((base.values - attributions[0].values).abs().max()) > 1e-3
    assert describe_model(model) != describe_model(model.set_adapter("other")), "activations of another adapter"


def test_checks_have_no_false_alarm() -> None:
    model = build_adapted(rank=2)
    names = ["unused-parameters", "meta-buffers", "config-fields", "save-load", "generation", "cache-decode"]
    report = ct.check(model, only=names, budget=120)
    assert report.ok, str(report)
    verdicts = {finding.check: finding.verdict for finding in report.findings}
    assert verdicts == dict.fromkeys(names, "pass")


def test_checks_of_an_adapter_that_cannot_be_merged() -> None:
    """An adapter of a tied embedding: checks that need a merged model are skipped."""
    model = build_adapted("tiny-gpt", targets=["embed", "attn.q"])
    report = ct.check(model, only=["save-load", "meta-buffers", "unused-parameters", "cache-decode", "tied-weights"])
    assert report.ok, str(report)
    verdicts = {finding.check: finding.verdict for finding in report.findings}
    assert verdicts["save-load"] == verdicts["meta-buffers"] == "skip"
    assert verdicts["cache-decode"] == verdicts["unused-parameters"] == "pass"


def test_inspector_names_the_adapter() -> None:
    model = build_adapted()
    assert describe_adapter(model) == "adapter sql: LoRA of rank 4 on 28 layers"
    inspector = build_inspector(Checkpoint(model, model.config, tokenizer_loader=byte_tokenizer), name="base")
    assert ModelInfo().run(inspector, QueryJob()).data["adapter"] == "adapter sql: LoRA of rank 4 on 28 layers"
    plain = build_inspector(Checkpoint(model.merge_and_unload(), model.config, tokenizer_loader=byte_tokenizer))
    assert ModelInfo().run(plain, QueryJob()).data["adapter"] is None


@pytest.mark.nightly
def test_command_line(tmp_path: Path, run_cli: CliRunner) -> None:
    """An adapter directory as SOURCE, a base with --adapter, and the merged model have the same output."""
    config = ct.config("tiny-llama").replace(vocab_size=259)
    model = ct.build(config, seed=0).requires_grad_(False)
    base = ct.save(Checkpoint(model, config, tokenizer_loader=byte_tokenizer), tmp_path / "base")
    model.add_adapter({"rank": 4}, seed=0)
    for key, parameter in model.named_parameters():
        if "lora_b" in key:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    adapter = ct.save_adapter(model, tmp_path / "adapter", base=base)
    merged = ct.save(Checkpoint(model, config, tokenizer_loader=byte_tokenizer), tmp_path / "merged")
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 8)
    options = {
        "generate": ["Once upon", "--max-new-tokens", 8, "--no-stats"],
        "eval": ["--text", tmp_path / "text.txt"],
        "trace": ["The cat"],
    }
    for verb, arguments in options.items():
        outputs = [
            run_cli(verb, source, *arguments, *extra).replace(str(source), "SOURCE")
            for source, extra in ((merged, []), (base, ["--adapter", adapter]), (adapter, []), (base, []))
        ]
        outputs = [output.partition("parameters")[2] or output for output in outputs]  # the header of trace
        assert outputs[0] == outputs[1] == outputs[2], verb
        assert outputs[3] != outputs[0], verb
    run_cli("check", base, "--adapter", adapter, "--only", "causality,unused-parameters")
    run_cli("open", base, "--adapter", adapter, "Once", "--export", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 100_000
    message = run_cli("trace", "tiny-llama", "text", "--adapter", adapter, code=2)
    assert "random weights, but an adapter needs the base model" in message
    message = run_cli("check", base, "--library", "transformers", "--adapter", adapter, code=2)
    assert "cutaway convert" in message
