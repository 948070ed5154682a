"""Ours ≡ TransformerLens' bridge, at every site that both have, on small GPT-2 and Llama models with random weights.

    python -m venv PEER && PEER/bin/pip install . transformer-lens==4.3.0
    PEER/bin/python tests/against_transformer_lens.py

Run by hand: TransformerLens is no dependency of ours, so it lives in an environment of its own. Each model is written
by transformers and opened by both. Exit code 1 if a site differs by more than 1e-5 of its largest value, or if one of
the table is missing.
"""

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from family_parity import randomise
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import cutaway as ct

BOUND = 1e-5
VOCAB = 61


class Same(NamedTuple):
    """Where TransformerLens has a value of ours: the first of these whose names it all has, added up."""

    theirs: tuple[tuple[str, ...], ...]
    said: str = ""
    """What must be minded to compare like with like."""


TABLE = {
    "embed": Same((("hook_embed", "hook_pos_embed"), ("hook_embed",)), "with learned positions, if there are any"),
    "blocks.{i}.resid_pre": Same((("blocks.{i}.hook_resid_pre",),)),
    "blocks.{i}.attn.in": Same((("blocks.{i}.attn.hook_in",),), "after the norm with its gain and bias"),
    "blocks.{i}.attn.q": Same((("blocks.{i}.attn.hook_rot_q",), ("blocks.{i}.attn.hook_q",)), "rotated, under RoPE"),
    "blocks.{i}.attn.k": Same((("blocks.{i}.attn.hook_rot_k",), ("blocks.{i}.attn.hook_k",)), "rotated, under RoPE"),
    "blocks.{i}.attn.v": Same((("blocks.{i}.attn.hook_v",),)),
    "blocks.{i}.attn.scores": Same(
        (("blocks.{i}.attn.hook_attn_scores",),), "hidden is −inf here, a least number there"
    ),
    "blocks.{i}.attn.pattern": Same((("blocks.{i}.attn.hook_pattern",),)),
    "blocks.{i}.attn.z": Same((("blocks.{i}.attn.hook_z",),)),
    "blocks.{i}.attn.out": Same((("blocks.{i}.hook_attn_out",),), "with the output's bias"),
    "blocks.{i}.resid_mid": Same((("blocks.{i}.hook_resid_mid",),)),
    "blocks.{i}.ffn.in": Same((("blocks.{i}.mlp.hook_in",),), "after the norm with its gain and bias"),
    "blocks.{i}.ffn.hidden": Same((("blocks.{i}.mlp.hook_post",),), "after the activation, times the gated part"),
    "blocks.{i}.ffn.out": Same((("blocks.{i}.hook_mlp_out",),), "with the output's bias"),
    "blocks.{i}.resid_post": Same((("blocks.{i}.hook_resid_post",),)),
    "final_norm": Same((("ln_final.hook_out",),), "with its gain and bias"),
    "logits": Same((("unembed.hook_out",),)),
}


def models() -> dict[str, Any]:
    """What to write and open: a plain model of each, and a Llama with everything that is unlike GPT-2."""
    llama = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    odd = {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, "mlp_bias": True}
    return {
        "GPT-2": transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
        ),
        "Llama": transformers.LlamaConfig(**llama, **heads),
        "Llama, grouped wide heads, biases, scaled RoPE": transformers.LlamaConfig(
            **llama, **heads, **odd, rope_parameters=scaled, tie_word_embeddings=True
        ),
    }


def write(config: Any, directory: Path) -> None:
    """A model with random weights, and the tokenizer without which TransformerLens opens none."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    model.save_pretrained(directory)
    words = Tokenizer(WordLevel({f"word{number}": number for number in range(VOCAB)}, unk_token="word0"))
    named = {"unk_token": "word0", "bos_token": "word1", "eos_token": "word2", "pad_token": "word2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(directory)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, relative to the largest value; infinite if they are not of one shape or do not hide the same."""
    hidden = ours == -torch.inf
    if ours.shape != theirs.shape or not torch.equal(hidden, theirs <= torch.finfo(theirs.dtype).min / 2):
        return torch.inf
    ours, theirs = ours[~hidden], theirs[~hidden]
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    return worst.item() if torch.isfinite(worst) else torch.inf


class Row(NamedTuple):
    """A site in all layers."""

    theirs: str
    shapes: list[tuple[int, ...]]
    apart: list[float]


def run(directory: Path) -> tuple[Any, dict[str, Tensor], list[str]]:
    """Our trace and their cache of one text, and what of theirs had no value in it."""
    bridge = TransformerBridge.boot_transformers(str(directory), dtype=torch.float32)
    checkpoint = ct.load(directory)
    tokens = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        _, cache = bridge.run_with_cache(tokens)
        with ct.trace(checkpoint, "*") as t:
            checkpoint.model(tokens)
    return t, dict(cache.items()), [name for name in bridge.hook_dict if name not in cache]


def kinds(names: Iterable[str]) -> list[str]:
    """Names with the layer left open, each once."""
    return list(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name) for name in names))


def compare(directory: Path) -> tuple[str, bool]:
    """A model's table, and whether all of it is equal."""
    t, theirs, silent = run(directory)
    rows = {kind: Row(" + ".join(same.theirs[-1]), [], []) for kind, same in TABLE.items()}
    met: set[int] = set()
    for site in t:
        [kind] = kinds([site])
        layer = site.split(".")[1] if site.startswith("blocks.") else ""
        for way in TABLE[kind].theirs if kind in TABLE else ():
            found = [theirs.get(name.replace("{i}", layer)) for name in way]
            values = [value for value in found if value is not None]
            if len(values) == len(way):
                shapes, apart = [*rows[kind].shapes, tuple(t[site].shape)], rows[kind].apart
                rows[kind] = Row(" + ".join(way), shapes, [*apart, difference(t[site], torch.stack(values).sum(0))])
                met |= {value.data_ptr() for value in values}
                break
    lines = [f"{'site':24} {'theirs':28} {'shape':16} {'layers':>6} {'difference':>10}"]
    for kind, row in rows.items():
        shape, worst = " × ".join(map(str, row.shapes[0] if row.shapes else ())), max(row.apart, default=torch.inf)
        named = row.theirs.replace("blocks.{i}.", "")
        lines.append(f"{kind:24} {named:28} {shape:16} {len(row.apart):6} {worst:10.1e}  {TABLE[kind].said}".rstrip())
    # A value under two names is one value: what is left is what no site of ours holds.
    rest = [name for name, value in theirs.items() if value.data_ptr() not in met]
    others = {"only ours": [kind for kind in kinds(t) if kind not in TABLE], "only theirs": kinds(rest)}
    others["theirs, without a value in this call"] = kinds(silent)
    lines += [f"{what}: {', '.join(names) or 'none'}" for what, names in others.items()]
    whole = all(len(rows[kind].apart) == sum(kinds([site]) == [kind] for site in t) > 0 for kind in rows)
    return "\n".join(lines), whole and max(each for row in rows.values() for each in row.apart) <= BOUND


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    fine = True
    for name, config in models().items():
        with tempfile.TemporaryDirectory() as directory:
            write(config, Path(directory))
            table, equal = compare(Path(directory))
        fine = fine and equal
        sys.stdout.write(f"\n{name}: {'equal' if equal else 'NOT EQUAL'}\n{table}\n")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
