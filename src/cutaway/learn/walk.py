"""The forward pass as lessons, told of one model: only what is true of it is said, with its own numbers."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cutaway.config import Config
from cutaway.config.attention import Heads, Latent
from cutaway.config.ffn import GatedPart, Moe
from cutaway.config.stack import Block, Stack

NEVER = {"when": "no model"}


@dataclass(frozen=True)
class Lesson:
    """A step on the way."""

    slug: str
    title: str
    sentences: tuple[str, ...]
    shows: str
    """A site in the block that is looked at (`attn.scores`), one outside blocks, or a picture's name (`highway`)."""
    notebook: int
    page: str
    """In the documentation."""
    about: tuple[str, ...] = ()
    """Topics and stages whose questions belong here."""
    exercises: tuple[int, ...] = ()


def walk(config: Config, *, fresh: bool = False) -> list[Lesson]:
    """The lessons of this model, in the order in which a tensor goes."""
    numbers, true = facts(config)
    true |= {"fresh"} if fresh else set()
    found = [each | each["instead"] if holds(each.get("instead", NEVER), "when", true) else each for each in written()]
    return [
        Lesson(
            slug=each["slug"],
            title=each["title"].format_map(numbers),
            sentences=tuple(said["text"].format_map(numbers) for said in each["say"] if holds(said, "when", true)),
            shows=each["shows"],
            notebook=each["notebook"],
            page=next((page for word, page in each.get("pages", {}).items() if word in true), each["page"]),
            about=tuple(each["about"]),
            exercises=tuple(each["exercises"]),
        )
        for each in found
        if holds(each, "only", true)
    ]


def belonging(lessons: list[Lesson], topic: str, stage: str) -> str | None:
    """The slug of the lesson that a question stands beside: the one that names its topic, or else its stage."""
    for word in (topic, stage):
        for lesson in lessons:
            if word in lesson.about:
                return lesson.slug
    return None


@cache
def written() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("walk.toml").read_text("utf-8"))["lesson"]
    return found


def holds(of: dict[str, Any], key: str, true: set[str]) -> bool:
    """Whether the model is all that is asked for; a word after ! must not hold."""
    words = [word.strip() for word in of.get(key, "").split(",") if word.strip()]
    return all((word.removeprefix("!") in true) != word.startswith("!") for word in words)


def facts(config: Config) -> tuple[dict[str, str], set[str]]:
    """The numbers of a model as they are written, and the words that hold of it; of the stack that writes."""
    stack = list(config.stacks.values())[-1]
    block = stack.blocks[-1]
    windows = sorted({each.attention.window for each in stack.blocks if each.attention.window is not None})
    numbers = attention_numbers(block, config.d_model) | ffn_numbers(block, config.d_model)
    numbers |= {"vocab": config.vocab_size, "d_model": config.d_model, "layers": stack.layers}
    numbers |= {"window": windows[0] if windows else 0, "context": learned_positions(stack)}
    numbers["cache_values"] = 2 * stack.layers * numbers["kv_heads"] * numbers["d_head"]
    written = {name: f"{number:,}" for name, number in numbers.items()}
    written["root"] = f"{math.sqrt(numbers['d_head']):.3g}"
    written["usual"] = f"{1 / math.sqrt(numbers['d_head']):.3g}"
    written["scale"] = f"{block.attention.scale or 0:.3g}"
    written["activation"] = getattr(block.ffn, "activation", "a clamped SwiGLU").replace("_", " ")
    return written, words(config, stack, block) | ({"window"} if windows else set())


def attention_numbers(block: Block, d_model: int) -> dict[str, float]:
    attention = block.attention
    if isinstance(attention, Latent):
        return {"heads": attention.heads, "kv_heads": 1, "group": 1, "d_head": attention.d_nope + attention.d_rope}
    heads, groups = attention.heads, attention.n_kv_heads
    numbers = {"heads": heads, "kv_heads": groups, "group": heads // groups, "d_head": attention.head_width(d_model)}
    return {**numbers, "softcap": attention.softcap or 0}


def ffn_numbers(block: Block, d_model: int) -> dict[str, float]:
    ffn = block.ffn
    if isinstance(ffn, Moe):
        return {"hidden": ffn.expert.hidden_width(d_model), "experts": ffn.experts, "top_k": ffn.router.top_k}
    return {"hidden": ffn.hidden_width(d_model)}


def learned_positions(stack: Stack) -> int:
    return getattr(stack.embedding.position, "length", 0) or 0


def words(config: Config, stack: Stack, block: Block) -> set[str]:
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
        "multi-head": isinstance(attention, Heads),
        "grouped": isinstance(attention, Heads) and attention.n_kv_heads < attention.heads,
        "latent": isinstance(attention, Latent),
        "scaled": attention.scale is None,
        "unscaled": attention.scale == 1,
        "own-scale": attention.scale not in (None, 1),
        "sink": getattr(attention, "sink", False),
        "softcap": isinstance(attention, Heads) and attention.softcap is not None,
        "moe": isinstance(ffn, Moe),
        "gated": isinstance(ffn, GatedPart) or (isinstance(ffn, Moe) and isinstance(ffn.expert, GatedPart)),
        "shared": stack.groups is not None,
    }
    return {word for word, true in asked.items() if true} | inside
