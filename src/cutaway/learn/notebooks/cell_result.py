"""Cells of a notebook with their outputs and figures. This module does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SvgFigure:
    """A figure of a cell: its title and the text of its SVG file."""

    title: str
    svg: str


@dataclass(frozen=True)
class CellResult:
    """A cell, what it printed, including the repr of its last expression, and its figures.

    A cell that was not run has no output and no figures.
    """

    kind: str
    source: str
    output: str = ""
    figures: tuple[SvgFigure, ...] = ()
