"""Compare cutaway's sites with TransformerLens' bridge, on small GPT-2 and Llama models with random weights.

    python -m venv PEER && PEER/bin/pip install . transformer-lens==4.3.0
    PYTHONPATH=tests PEER/bin/python tests/lens/compare_transformer_lens.py

Run manually: TransformerLens is not a dependency of cutaway, so it is installed in a separate environment. Each model
is saved by transformers and loaded by both. Exit code 1 if a site differs by more than 1e-5 of its largest value, or if
a site of the table is missing.
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

TOLERANCE = 1e-5
VOCAB_SIZE = 61
PADDING_MASKS = (
    torch.ones(2, 11, dtype=torch.bool),
    torch.tensor([[True] * 11, [True] * 7 + [False] * 4, [False] * 4 + [True] * 7]),
)
"""One call per mask: without padding, and with right and left padding, whose positions are not compared."""


class Equivalent(NamedTuple):
    """TransformerLens hooks that equal a site: the sum of the first alternative whose hooks all exist."""

    hooks: tuple[tuple[str, ...], ...]
    note: str = ""
    """What the compared value includes."""


TABLE = {
    "embed": Equivalent(
        (("hook_embed", "hook_pos_embed"), ("hook_embed",)), "with learned positions, if there are any"
    ),
    "blocks.{i}.resid_pre": Equivalent((("blocks.{i}.hook_resid_pre",),)),
    "blocks.{i}.attn.in": Equivalent((("blocks.{i}.attn.hook_in",),), "after the norm with its gain and bias"),
    "blocks.{i}.attn.q": Equivalent(
        (("blocks.{i}.attn.hook_rot_q",), ("blocks.{i}.attn.hook_q",)), "rotated, under RoPE"
    ),
    "blocks.{i}.attn.k": Equivalent(
        (("blocks.{i}.attn.hook_rot_k",), ("blocks.{i}.attn.hook_k",)), "rotated, under RoPE"
    ),
    "blocks.{i}.attn.v": Equivalent((("blocks.{i}.attn.hook_v",),)),
    "blocks.{i}.attn.scores": Equivalent(
        (("blocks.{i}.attn.hook_attn_scores",),), "masked: −inf in cutaway, the smallest number in TransformerLens"
    ),
    "blocks.{i}.attn.pattern": Equivalent((("blocks.{i}.attn.hook_pattern",),)),
    "blocks.{i}.attn.z": Equivalent((("blocks.{i}.attn.hook_z",),)),
    "blocks.{i}.attn.out": Equivalent((("blocks.{i}.hook_attn_out",),), "with the output bias"),
    "blocks.{i}.resid_mid": Equivalent((("blocks.{i}.hook_resid_mid",),)),
    "blocks.{i}.ffn.in": Equivalent((("blocks.{i}.mlp.hook_in",),), "after the norm with its gain and bias"),
    "blocks.{i}.ffn.hidden": Equivalent((("blocks.{i}.mlp.hook_post",),), "after the activation and the gate"),
    "blocks.{i}.ffn.out": Equivalent((("blocks.{i}.hook_mlp_out",),), "with the output bias"),
    "blocks.{i}.resid_post": Equivalent((("blocks.{i}.hook_resid_post",),)),
    "final_norm": Equivalent((("ln_final.hook_out",),), "with its gain and bias"),
    "logits": Equivalent((("unembed.hook_out",),)),
}


def models() -> dict[str, Any]:
    """Configs to compare: a plain GPT-2 and Llama, and a Llama with GQA, wide heads, biases and scaled RoPE."""
    llama = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    odd = {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, "mlp_bias": True}
    return {
        "GPT-2": transformers.GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
        ),
        "Llama": transformers.LlamaConfig(**llama, **heads),
        "Llama, GQA, wide heads, biases, scaled RoPE": transformers.LlamaConfig(
            **llama, **heads, **odd, rope_parameters=scaled, tie_word_embeddings=True
        ),
    }


def save_model(config: Any, directory: Path) -> None:
    """Save a model with random weights, and a tokenizer, which TransformerLens requires."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize_weights(model, 0)
    model.save_pretrained(directory)
    backend = Tokenizer(WordLevel({f"word{index}": index for index in range(VOCAB_SIZE)}, unk_token="word0"))
    special_tokens = {"unk_token": "word0", "bos_token": "word1", "eos_token": "word2", "pad_token": "word2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens).save_pretrained(directory)


def run_both(directory: Path) -> tuple[Any, list[dict[str, Tensor]], list[str]]:
    """Return cutaway's trace of all calls, TransformerLens' cache of each, and its hooks that were not called."""
    bridge = TransformerBridge.boot_transformers(str(directory), dtype=torch.float32)
    checkpoint = ct.load(directory)
    caches: list[dict[str, Tensor]] = []
    with torch.inference_mode(), ct.trace(checkpoint, "*") as t:
        for mask in PADDING_MASKS:
            tokens = torch.randint(3, VOCAB_SIZE, mask.shape, generator=torch.Generator().manual_seed(0))
            has_padding = not mask.all()
            checkpoint.model(tokens, mask if has_padding else None)
            _, cache = bridge.run_with_cache(tokens, attention_mask=mask.long() if has_padding else None)
            caches.append(dict(cache.items()))
    return t, caches, [name for name in bridge.hook_dict if name not in caches[0]]


def layer_template(name: str) -> str:
    """Return a site or hook name with `{i}` for the layer."""
    return re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)


def equivalent_hooks(site: str, cache: dict[str, Tensor]) -> list[str]:
    """Return the hooks whose sum equals this site; empty if the cache lacks them."""
    layer = site.split(".")[1] if site.startswith("blocks.") else ""
    alternatives = [[name.replace("{i}", layer) for name in hooks] for hooks in TABLE[layer_template(site)].hooks]
    return next((hooks for hooks in alternatives if all(name in cache for name in hooks)), [])


def relative_error(value: Any, hook_values: list[Tensor], mask: Tensor) -> float:
    """Largest difference relative to the largest value; infinite if shapes or masked scores differ."""
    if [hook_value.shape for hook_value in hook_values] != [value.shape] * max(len(hook_values), 1):
        return torch.inf
    token_axis = value.axes.index("T" if "T" in value.axes else "S")
    actual, expected = (x.movedim(token_axis, 1)[mask] for x in (value, torch.stack(hook_values).sum(0)))
    masked = actual == -torch.inf
    if not torch.equal(masked, expected <= torch.finfo(expected.dtype).min / 2):
        return torch.inf
    error = ((actual - expected)[~masked].abs().max() / expected[~masked].abs().max()).item()
    return error if error < torch.inf else torch.inf  # NaN becomes infinite


def compare(directory: Path) -> tuple[str, bool]:
    """Return the comparison table of a model, and whether all sites are equal."""
    t, caches, uncalled = run_both(directory)
    cache, is_equal = caches[0], True
    lines = [f"{'site':24} {'TransformerLens':28} {'shape':16} {'layers':>6} {'error':>10}"]
    for row, equivalent in TABLE.items():
        layers = [site for site in t if layer_template(site) == row]
        pairs = [
            (t[site, call], equivalent_hooks(site, call_cache), call)
            for site in layers
            for call, call_cache in enumerate(caches)
        ]
        errors = [
            relative_error(value, [caches[call][name] for name in hooks], PADDING_MASKS[call])
            for value, hooks, call in pairs
        ]
        error = max(errors, default=torch.inf)
        is_equal = is_equal and error <= TOLERANCE
        value, hooks, _ = pairs[-1] if pairs else (torch.empty(0), [], 0)
        hook_text = " + ".join(name.removeprefix("blocks.").lstrip("0123456789.") for name in hooks) or "nothing"
        shape = " × ".join(map(str, value.shape))
        lines.append(f"{row:24} {hook_text:28} {shape:16} {len(layers):6} {error:10.1e}  {equivalent.note}".rstrip())
    # Hooks with the same storage are aliases; the rest has no equivalent site.
    compared = {
        cache[name].data_ptr() for site in t if layer_template(site) in TABLE for name in equivalent_hooks(site, cache)
    }
    summary = {
        "only in cutaway": [site for site in t if layer_template(site) not in TABLE],
        "only in TransformerLens": [name for name, value in cache.items() if value.data_ptr() not in compared],
        "in TransformerLens, not called": uncalled,
    }
    for title, entries in summary.items():
        lines.append(f"{title}: {', '.join(dict.fromkeys(map(layer_template, entries))) or 'none'}")
    return "\n".join(lines), is_equal


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    all_equal = True
    for name, config in models().items():
        with tempfile.TemporaryDirectory() as directory:
            save_model(config, Path(directory))
            table, is_equal = compare(Path(directory))
        all_equal = all_equal and is_equal
        sys.stdout.write(f"\n{name}: {'equal' if is_equal else 'NOT EQUAL'}\n{table}\n")
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
