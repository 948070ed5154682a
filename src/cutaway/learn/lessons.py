"""Lessons on the forward pass of a model. They contain only sentences that hold for the config of that model."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cutaway.config import Config
from cutaway.config.attention import LatentAttention, MultiHeadBase
from cutaway.config.ffn import GatedBase, Moe
from cutaway.config.stack import Block, Stack
from cutaway.learn.claims import fill_figures

Table = dict[str, Any]
"""A table of lessons.toml."""
_NEVER = {"when": "no model"}


@dataclass(frozen=True)
class Lesson:
    """One lesson on a stage of the forward pass."""

    slug: str
    title: str
    sentences: tuple[str, ...]
    figure: str
    """A site in the selected block (`attn.scores`), a site outside the blocks, or a figure (`residual_stream`)."""
    notebook: int
    docs_page: str
    """Path of a documentation page, relative to docs/."""
    topics: tuple[str, ...] = ()
    """Quiz topics and stages whose questions belong to this lesson."""
    exercises: tuple[int, ...] = ()
    claim_topics: tuple[str, ...] = ()
    """Topics of the claims that are shown with the lesson."""


def build_lessons(config: Config, *, is_untrained: bool = False) -> list[Lesson]:
    """Build the lessons for a model, in the order of the forward pass."""
    numbers, tags = _model_facts(config)
    tags |= {"untrained"} if is_untrained else set()
    tables = [
        table | table["override"] if _conditions_hold(table.get("override", _NEVER), "when", tags) else table
        for table in _read_lessons()
    ]
    return [
        Lesson(
            slug=table["slug"],
            title=table["title"].format_map(numbers),
            sentences=tuple(
                sentence["text"].format_map(numbers)
                for sentence in table["sentences"]
                if _conditions_hold(sentence, "when", tags)
            ),
            figure=table["figure"],
            notebook=table["notebook"],
            docs_page=_docs_page(table, tags),
            topics=tuple(table["topics"]),
            exercises=tuple(table["exercises"]),
            claim_topics=tuple(table.get("claim_topics", ())),
        )
        for table in tables
        if _conditions_hold(table, "requires", tags)
    ]


def _docs_page(lesson: Table, tags: set[str]) -> str:
    """Return the lesson's documentation page for the first tag that holds for the model, or its default page."""
    return str(next((page for tag, page in lesson.get("docs_pages", {}).items() if tag in tags), lesson["docs_page"]))


def find_lesson(lessons: list[Lesson], topic: str, stage: str) -> str | None:
    """Return the slug of the lesson that lists a question's topic, else of the lesson that lists its stage, or None."""
    for name in (topic, stage):
        for lesson in lessons:
            if name in lesson.topics:
                return lesson.slug
    return None


@cache
def _read_lessons() -> list[Table]:
    return list(tomllib.loads(fill_figures(Path(__file__).with_name("lessons.toml").read_text("utf-8")))["lesson"])


def _conditions_hold(table: Table, key: str, tags: set[str]) -> bool:
    """Whether all tags listed in `table[key]` are in `tags`. A tag with a leading ! must not be in `tags`."""
    conditions = [part.strip() for part in table.get(key, "").split(",") if part.strip()]
    return all((condition.removeprefix("!") in tags) != condition.startswith("!") for condition in conditions)


def _model_facts(config: Config) -> tuple[dict[str, str], set[str]]:
    """Return the numbers that lesson texts quote, by name and formatted, and the tags that hold for the model."""
    stack = list(config.stacks.values())[-1]
    block = stack.blocks[-1]
    windows = sorted({b.attention.window for b in stack.blocks if b.attention.window is not None})
    numbers = _attention_numbers(block, config.d_model) | _ffn_numbers(block, config.d_model)
    numbers |= {"vocab": config.vocab_size, "d_model": config.d_model, "layers": stack.layers}
    numbers |= {"window": windows[0] if windows else 0, "context": _num_learned_positions(stack)}
    numbers["cache_values"] = 2 * stack.layers * numbers["kv_heads"] * numbers["d_head"]
    formatted = {name: f"{number:,}" for name, number in numbers.items()}
    formatted["root"] = f"{math.sqrt(numbers['d_head']):.3g}"
    formatted["usual"] = f"{1 / math.sqrt(numbers['d_head']):.3g}"
    formatted["scale"] = f"{block.attention.scale or 0:.3g}"
    formatted["activation"] = getattr(block.ffn, "activation", "a clamped SwiGLU").replace("_", " ")
    return formatted, _model_tags(config, stack, block) | ({"window"} if windows else set())


def _attention_numbers(block: Block, d_model: int) -> dict[str, float]:
    attention = block.attention
    if isinstance(attention, LatentAttention):
        return {"heads": attention.heads, "kv_heads": 1, "group": 1, "d_head": attention.d_nope + attention.d_rope}
    heads, kv_heads = attention.heads, attention.num_kv_heads
    numbers = {"heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "d_head": attention.head_dim(d_model)}
    return {**numbers, "softcap": attention.softcap or 0}


def _ffn_numbers(block: Block, d_model: int) -> dict[str, float]:
    ffn = block.ffn
    if isinstance(ffn, Moe):
        return {"hidden": ffn.expert.hidden_dim(d_model), "experts": ffn.experts, "top_k": ffn.router.top_k}
    return {"hidden": ffn.hidden_dim(d_model)}


def _num_learned_positions(stack: Stack) -> int:
    return getattr(stack.embedding.position, "length", 0) or 0


def _model_tags(config: Config, stack: Stack, block: Block) -> set[str]:
    """Return the tags that hold for the model: names of its properties, such as 'causal', 'tied' or 'moe'."""
    attention, ffn, placement = block.attention, block.ffn, stack.placement
    embedding_position = stack.embedding.position.kind
    attention_positions = {b.attention.position.kind for b in stack.blocks} - {"none"}
    conditions = {
        config.form: True,
        "causal": config.form != "encoder",
        "head": config.head.kind == "lm",
        "tied": getattr(config.head, "tied", False),
        "final-norm": placement.final_norm,
        "pre": placement.kind in ("pre", "sandwich", "parallel"),
        placement.kind: True,
        stack.norm.kind: True,
        embedding_position: embedding_position != "none",
        "no-position": embedding_position == "none" and not attention_positions,
        "multi-head": isinstance(attention, MultiHeadBase),
        "grouped": isinstance(attention, MultiHeadBase) and attention.num_kv_heads < attention.heads,
        "latent": isinstance(attention, LatentAttention),
        "scaled": attention.scale is None,
        "unscaled": attention.scale == 1,
        "own-scale": attention.scale not in (None, 1),
        "sink": getattr(attention, "sink", False),
        "softcap": isinstance(attention, MultiHeadBase) and attention.softcap is not None,
        "moe": isinstance(ffn, Moe),
        "gated": isinstance(ffn, GatedBase) or (isinstance(ffn, Moe) and isinstance(ffn.expert, GatedBase)),
        "shared": stack.layer_groups is not None,
    }
    return {tag for tag, holds in conditions.items() if holds} | attention_positions
