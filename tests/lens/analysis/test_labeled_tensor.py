"""Pictures say what the numbers say: names whole, scales that fit, what was masked left blank."""

import numpy as np
import pytest
import torch

import cutaway as ct
from cutaway.lens import trace
from cutaway.lens.analysis import LabeledTensor


def written(figure: object) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]  # type: ignore[attr-defined]


def test_what_attention_may_not_see_is_blank() -> None:
    model = ct.build("tiny-gpt", seed=0)
    with torch.no_grad(), trace(model, "attn.scores", layers=0) as t:
        model(torch.arange(3, 9)[None])
    image = t["blocks.0.attn.scores"].plot().axes[0].images[0]
    assert np.isfinite(image.get_clim()).all()
    assert np.ma.getmaskarray(image.get_array())[np.triu_indices(6, 1)].all()


def test_long_names_stand_whole_beside_lying_bars() -> None:
    names = ("FFN before attention in block 11", "baseline")
    figure = LabeledTensor("a title", torch.tensor([12.0, -0.5]), ("edit",), (names,), "nats").plot()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(names)
    assert written(figure) == ["12.0", "−0.5"]


def test_small_maps_have_their_numbers_on_them() -> None:
    values = torch.tensor([[0.25, -1e-7, 1.0], [0.0, float("nan"), 0.5]])
    labels = (("0", "1"), (r"$\x$", "$b$", "c"))
    figure = LabeledTensor("a title", values, ("layer", "token"), labels, note=r"what $\x$ is").plot()
    assert written(figure) == ["0.25", "0", "1.00", "0", "0.50"]
    assert figure.axes[0].images[0].get_clim() == (0, 1), "rounding below 0 is no sign"
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [r"$\x$", "$b$", "c"]
    figure.canvas.draw()  # a dollar begins no formula
    below = LabeledTensor("a title", values - 0.5, ("layer", "token"), labels).plot().axes[0].images[0]
    assert below.get_clim() == pytest.approx((-0.5, 0.5))
