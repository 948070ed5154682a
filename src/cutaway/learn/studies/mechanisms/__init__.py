"""Mechanisms of the pretrained models, each confirmed by an intervention: decoder, encoder and encoder-decoder."""

from functools import partial
from typing import Any

from cutaway.learn.studies.mechanisms import dates, encoder, english
from cutaway.learn.studies.study import PartFn

MODULES = {"english": english, "encoder": encoder, "dates": dates}


def list_parts(device: str) -> dict[str, PartFn]:
    return {
        f"{name} {part.__name__.removeprefix('measure_').replace('_', ' ')}": partial(part, device)
        for name, module in MODULES.items()
        for part in module.PARTS
    }


def describe_settings(device: str) -> dict[str, Any]:
    return {"models": "tiny-english, tiny-english-encoder, tiny-dates"}
