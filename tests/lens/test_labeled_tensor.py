"""Plots of traced and labeled tensors: labels, annotations, color limits, masked cells."""

import numpy as np
import pytest
import torch

import cutaway as ct
from cutaway.lens import trace
from cutaway.lens.analysis import LabeledTensor


def annotation_texts(figure: object) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]  # type: ignore[attr-defined]


def test_masked_scores_are_blank() -> None:
    model = ct.build("tiny-gpt", seed=0)
    with torch.no_grad(), trace(model, "attn.scores", layers=0) as t:
        model(torch.arange(3, 9)[None])
    image = t["blocks.0.attn.scores"].plot().axes[0].images[0]
    assert np.isfinite(image.get_clim()).all()
    assert np.ma.getmaskarray(image.get_array())[np.triu_indices(6, 1)].all()


def test_long_labels_use_horizontal_bars() -> None:
    names = ("FFN before attention in block 11", "baseline")
    figure = LabeledTensor("a title", torch.tensor([12.0, -0.5]), ("edit",), (names,), "nats").plot()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(names)
    assert annotation_texts(figure) == ["12.0", "−0.5"]


def test_small_heat_maps_are_annotated() -> None:
    values = torch.tensor([[0.25, -1e-7, 1.0], [0.0, float("nan"), 0.5]])
    labels = (("0", "1"), (r"$\x$", "$b$", "c"))
    figure = LabeledTensor("a title", values, ("layer", "token"), labels, note=r"note $\x$").plot()
    assert annotation_texts(figure) == ["0.25", "0", "1.00", "0", "0.50"]
    assert figure.axes[0].images[0].get_clim() == (0, 1), "rounding errors below 0 are not negative values"
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [r"$\x$", "$b$", "c"]
    figure.canvas.draw()  # dollar signs are not parsed as math
    negative = LabeledTensor("a title", values - 0.5, ("layer", "token"), labels).plot().axes[0].images[0]
    assert negative.get_clim() == pytest.approx((-0.5, 0.5))


def test_long_axes_of_indices_have_few_tick_labels() -> None:
    indices = tuple(map(str, range(65)))
    figure = LabeledTensor("pattern", torch.rand(65, 65), ("T", "S"), (indices, indices)).plot()
    width, height = figure.get_size_inches()
    assert max(width, height) < 8
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == [str(i) for i in range(0, 65, 5)]
