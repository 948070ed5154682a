"""The forward pass as lessons, told of one model: only what is true of it is said, with its own numbers."""

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

_NEVER = {"when": "no model"}


@dataclass(frozen=True)
class Lesson:
    """A step on the way."""

    slug: str
    title: str
    sentences: tuple[str, ...]
    figure: str
    """A site in the block that is looked at (`attn.scores`), one outside blocks, or a picture's name (`highway`)."""
    notebook: int
    docs_page: str
    """In the documentation."""
    topics: tuple[str, ...] = ()
    """Topics and stages whose questions belong here."""
    exercises: tuple[int, ...] = ()


def build_lessons(config: Config, *, is_untrained: bool = False) -> list[Lesson]:
    """The lessons of this model, in the order in which a tensor goes."""
    numbers, true = _model_facts(config)
    true |= {"untrained"} if is_untrained else set()
    found = [
        each | each["override"] if _conditions_hold(each.get("override", _NEVER), "when", true) else each
        for each in _read_lessons()
    ]
    return [
        Lesson(
            slug=each["slug"],
            title=each["title"].format_map(numbers),
            sentences=tuple(
                said["text"].format_map(numbers) for said in each["sentences"] if _conditions_hold(said, "when", true)
            ),
            figure=each["figure"],
            notebook=each["notebook"],
            docs_page=_docs_page(each, true),
            topics=tuple(each["topics"]),
            exercises=tuple(each["exercises"]),
        )
        for each in found
        if _conditions_hold(each, "requires", true)
    ]


def _docs_page(lesson: dict[str, Any], tags: set[str]) -> str:
    """The page of the first tag that holds, or the usual one."""
    return str(next((page for tag, page in lesson.get("docs_pages", {}).items() if tag in tags), lesson["docs_page"]))


def find_lesson(lessons: list[Lesson], topic: str, stage: str) -> str | None:
    """The slug of the lesson that a question stands beside: the one that names its topic, or else its stage."""
    for word in (topic, stage):
        for lesson in lessons:
            if word in lesson.topics:
                return lesson.slug
    return None


@cache
def _read_lessons() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("lessons.toml").read_text("utf-8"))["lesson"]
    return found


def _conditions_hold(table: dict[str, Any], key: str, tags: set[str]) -> bool:
    """Whether the model is all that is asked for; a word after ! must not hold."""
    words = [word.strip() for word in table.get(key, "").split(",") if word.strip()]
    return all((word.removeprefix("!") in tags) != word.startswith("!") for word in words)


def _model_facts(config: Config) -> tuple[dict[str, str], set[str]]:
    """The numbers of a model as they are written, and the words that hold of it; of the stack that writes."""
    stack = list(config.stacks.values())[-1]
    block = stack.blocks[-1]
    windows = sorted({each.attention.window for each in stack.blocks if each.attention.window is not None})
    numbers = _attention_numbers(block, config.d_model) | _ffn_numbers(block, config.d_model)
    numbers |= {"vocab": config.vocab_size, "d_model": config.d_model, "layers": stack.layers}
    numbers |= {"window": windows[0] if windows else 0, "context": _num_learned_positions(stack)}
    numbers["cache_values"] = 2 * stack.layers * numbers["kv_heads"] * numbers["d_head"]
    written = {name: f"{number:,}" for name, number in numbers.items()}
    written["root"] = f"{math.sqrt(numbers['d_head']):.3g}"
    written["usual"] = f"{1 / math.sqrt(numbers['d_head']):.3g}"
    written["scale"] = f"{block.attention.scale or 0:.3g}"
    written["activation"] = getattr(block.ffn, "activation", "a clamped SwiGLU").replace("_", " ")
    return written, _model_tags(config, stack, block) | ({"window"} if windows else set())


def _attention_numbers(block: Block, d_model: int) -> dict[str, float]:
    attention = block.attention
    if isinstance(attention, LatentAttention):
        return {"heads": attention.heads, "kv_heads": 1, "group": 1, "d_head": attention.d_nope + attention.d_rope}
    heads, groups = attention.heads, attention.num_kv_heads
    numbers = {"heads": heads, "kv_heads": groups, "group": heads // groups, "d_head": attention.head_dim(d_model)}
    return {**numbers, "softcap": attention.softcap or 0}


def _ffn_numbers(block: Block, d_model: int) -> dict[str, float]:
    ffn = block.ffn
    if isinstance(ffn, Moe):
        return {"hidden": ffn.expert.hidden_dim(d_model), "experts": ffn.experts, "top_k": ffn.router.top_k}
    return {"hidden": ffn.hidden_dim(d_model)}


def _num_learned_positions(stack: Stack) -> int:
    return getattr(stack.embedding.position, "length", 0) or 0


def _model_tags(config: Config, stack: Stack, block: Block) -> set[str]:
    """What holds of it, in one word each."""
    attention, ffn, placement = block.attention, block.ffn, stack.placement
    added, inside = stack.embedding.position.kind, {each.attention.position.kind for each in stack.blocks} - {"none"}
    asked = {
        config.form: True,
        "causal": config.form != "encoder",
        "head": config.head.kind != "none",
        "tied": getattr(config.head, "tied", False),
        "final-norm": placement.final_norm,
        "pre": placement.kind in ("pre", "sandwich", "parallel"),
        placement.kind: True,
        stack.norm.kind: True,
        added: added != "none",
        "no-position": added == "none" and not inside,
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
    return {word for word, true in asked.items() if true} | inside
