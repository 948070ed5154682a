"""Gradient-norm queries equal the library."""

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.learn.studies import load_results
from cutaway.lens.analysis import gradient_by_depth, gradient_by_placement
from cutaway.lens.analysis.gradients import InitName, placement_config
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput, TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryCancelled, QueryJob
from cutaway.serve.inspect.queries.gradient_norms import GradientsByDepth, GradientsByPlacement

pytestmark = pytest.mark.unchecked


def build_inspector(name: str) -> Inspector:
    model = ct.build(name, seed=0)
    return Inspector(model, TokenizerAdapter(model.config.vocab_size), name=name)


def test_gradients_by_placement_equal_the_study() -> None:
    """The measurement of the page with ten seeds is the stored result of the study, which the page also quotes."""
    query = GradientsByPlacement(depths=(6,), num_seeds=10, form="encoder", activation="relu", init="xavier")
    result = query.run(build_inspector("tiny-gpt"), QueryJob())
    for placement, sentence in zip(result.data["placements"], result.data["study"], strict=True):
        stored = load_results("norm-placement").get(f"gradient/{placement}/encoder/relu/xavier/6")
        assert result.data["first_to_last_ratio"][f"{placement}.6"] == pytest.approx(stored.mean, rel=1e-3)
        assert str(stored) in sentence


@pytest.mark.parametrize("init", ["normal", "gpt2"])
def test_gradients_by_placement_equal_the_analysis(init: InitName) -> None:
    result = GradientsByPlacement(depths=(6,), num_seeds=2, init=init).run(build_inspector("tiny-gpt"), QueryJob())
    config = placement_config("pre", 6, activation="relu", init=init)
    placements = ("pre", "post", "sandwich")
    expected = gradient_by_placement(config, placements=placements, depths=(6,), num_seeds=2, num_texts=3)
    for row, placement in enumerate(placements):
        mean = result.tensors[f"{placement}.6"].log().mean(0).exp()
        torch.testing.assert_close(mean, expected.values[row, :, 0])


def test_cancelled_query_raises() -> None:
    job = QueryJob()
    job.cancelled.set()
    with pytest.raises(QueryCancelled):
        GradientsByPlacement().run(build_inspector("tiny-gpt"), job)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-bert", "tiny-t5"])
def test_gradients_by_depth_equal_the_analysis(name: str) -> None:
    inspector, tokens = build_inspector(name), [3, 7, 9, 4]
    source = [5, 6] if name == "tiny-t5" else None
    model_input = ModelInput(tokens=tuple(tokens), source=None if source is None else tuple(source))
    result = GradientsByDepth(input=model_input).run(inspector, QueryJob())
    torch.testing.assert_close(
        result.tensors["grad_norms"], gradient_by_depth(inspector.model, tokens, source=source).values
    )
    edited = GradientsByDepth(input=model_input.model_copy(update={"edits": zero_first_ffn(inspector)})).run(
        inspector, QueryJob()
    )
    assert not torch.equal(edited.tensors["grad_norms"], result.tensors["grad_norms"])


def zero_first_ffn(inspector: Inspector) -> dict[str, str]:
    return {next(name for name in inspector.sites if name.endswith("ffn.out") and not name.startswith("enc")): "zero"}


def test_too_long_text_is_an_error() -> None:
    with pytest.raises(InputError, match="shorten"):
        GradientsByDepth(input=ModelInput(tokens=(1,) * 513)).run(build_inspector("tiny-gpt"), QueryJob())
