"""Ours ≡ TransformerLens' bridge, at every site that both have, on small GPT-2 and Llama models with random weights.

    python -m venv PEER && PEER/bin/pip install . transformer-lens==4.3.0
    PYTHONPATH=tests PEER/bin/python tests/lens/compare_transformer_lens.py

Run by hand: TransformerLens is no dependency of ours, so it lives in an environment of its own. Each model is written
by transformers and opened by both. Exit code 1 if a site differs by more than 1e-5 of its largest value, or if one of
the table is missing.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from support.family_parity import randomize_weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import cutaway as ct

BOUND = 1e-5
VOCAB = 61
REAL = (
    torch.ones(2, 11, dtype=torch.bool),
    torch.tensor([[True] * 11, [True] * 7 + [False] * 4, [False] * 4 + [True] * 7]),
)
"""The calls: whole rows, and rows padded on the right and on the left, where what stands at padding is left out."""


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
    randomize_weights(model, 0)
    model.save_pretrained(directory)
    words = Tokenizer(WordLevel({f"word{number}": number for number in range(VOCAB)}, unk_token="word0"))
    named = {"unk_token": "word0", "bos_token": "word1", "eos_token": "word2", "pad_token": "word2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(directory)


def run(directory: Path) -> tuple[Any, list[dict[str, Tensor]], list[str]]:
    """Our trace of all calls, their cache of each, and what of theirs never had a value."""
    bridge = TransformerBridge.boot_transformers(str(directory), dtype=torch.float32)
    checkpoint = ct.load(directory)
    caches: list[dict[str, Tensor]] = []
    with torch.inference_mode(), ct.trace(checkpoint, "*") as t:
        for real in REAL:
            tokens = torch.randint(3, VOCAB, real.shape, generator=torch.Generator().manual_seed(0))
            mask = None if real.all() else real
            checkpoint.model(tokens, mask)
            _, cache = bridge.run_with_cache(tokens, attention_mask=None if mask is None else mask.long())
            caches.append(dict(cache.items()))
    return t, caches, [name for name in bridge.hook_dict if name not in caches[0]]


def kind(name: str) -> str:
    """The name with its layer left open."""
    return re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)


def names(site: str, theirs: dict[str, Tensor]) -> list[str]:
    """What of theirs, added up, is this site; nothing if they lack it."""
    layer = site.split(".")[1] if site.startswith("blocks.") else ""
    ways = [[name.replace("{i}", layer) for name in way] for way in TABLE[kind(site)].theirs]
    return next((way for way in ways if all(name in theirs for name in way)), [])


def difference(ours: Any, theirs: list[Tensor], real: Tensor) -> float:
    """The largest, relative to the largest value; infinite if they are not of one shape or do not hide the same."""
    if [value.shape for value in theirs] != [ours.shape] * max(len(theirs), 1):
        return torch.inf
    tokens = ours.axes.index("T" if "T" in ours.axes else "S")
    here, there = (value.movedim(tokens, 1)[real] for value in (ours, torch.stack(theirs).sum(0)))
    hidden = here == -torch.inf
    if not torch.equal(hidden, there <= torch.finfo(there.dtype).min / 2):
        return torch.inf
    worst = ((here - there)[~hidden].abs().max() / there[~hidden].abs().max()).item()
    return worst if worst < torch.inf else torch.inf  # not a number is no small one


def compare(directory: Path) -> tuple[str, bool]:
    """A model's table, and whether all of it is equal."""
    t, caches, silent = run(directory)
    first, fine = caches[0], True
    lines = [f"{'site':24} {'theirs':28} {'shape':16} {'layers':>6} {'difference':>10}"]
    for row, same in TABLE.items():
        layers = [site for site in t if kind(site) == row]
        pairs = [(t[site, call], names(site, cache), call) for site in layers for call, cache in enumerate(caches)]
        apart = [difference(ours, [caches[call][name] for name in met], REAL[call]) for ours, met, call in pairs]
        worst = max(apart, default=torch.inf)
        fine = fine and worst <= BOUND
        ours, met, _ = pairs[-1] if pairs else (torch.empty(0), [], 0)
        named = " + ".join(name.removeprefix("blocks.").lstrip("0123456789.") for name in met) or "nothing"
        shape = " × ".join(map(str, ours.shape))
        lines.append(f"{row:24} {named:28} {shape:16} {len(layers):6} {worst:10.1e}  {same.said}".rstrip())
    # A value under two names is one value: what is left is what no site of ours holds.
    held = {first[name].data_ptr() for site in t if kind(site) in TABLE for name in names(site, first)}
    rest = [name for name, value in first.items() if value.data_ptr() not in held]
    others = {"only ours": [site for site in t if kind(site) not in TABLE], "only theirs": rest}
    for what, found in (others | {"theirs, without a value in these calls": silent}).items():
        lines.append(f"{what}: {', '.join(dict.fromkeys(map(kind, found))) or 'none'}")
    return "\n".join(lines), fine


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
