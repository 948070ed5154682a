"""Parity for users: one checkpoint in transformers and here, compared layer by layer, in gradients and in tokens."""

import re
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.config import Encoder, EncoderDecoder
from cutaway.errors import InputError, format_error
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import load, resolve_checkpoint_path
from cutaway.families.registry import families
from cutaway.families.save import export_weights
from cutaway.model import Transformer

BATCH_SIZE, SEQ_LEN, MAX_NEW_TOKENS = 3, 24, 12


@dataclass
class VerificationResult:
    """How far two implementations of one checkpoint are apart, in fp32."""

    source: str
    max_logit_diff: float
    """The worst difference of a logit, padded and not."""
    logit_tolerance: float
    layer_diffs: list[tuple[str, float, float]]
    """What leaves each layer: name, worst difference, and its bound."""
    max_grad_diff: float
    """The worst relative difference of a parameter's gradient."""
    max_grad_diff_parameter: str
    num_gradients_compared: int
    greedy_tokens: str
    """Greedy tokens: 'equal', where they part, or that there are none."""
    notes: list[str] = field(default_factory=list)

    @property
    def first_mismatch(self) -> str | None:
        """The first place where the two part."""
        return next((name for name, worst, bound in self.layer_diffs if not worst <= bound), None)

    @property
    def ok(self) -> bool:
        within_tolerance = (
            self.first_mismatch is None and self.max_logit_diff <= self.logit_tolerance and self.max_grad_diff <= 1e-4
        )
        return within_tolerance and self.greedy_tokens in ("equal", "not applicable (encoder)")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"first_mismatch": self.first_mismatch, "ok": self.ok}

    def __str__(self) -> str:
        lines = [f"{self.source} beside transformers, fp32"]
        width = max(len(name) for name, _, _ in self.layer_diffs)
        for name, worst, bound in self.layer_diffs:
            lines.append(
                f"  {name:<{width}}  worst {worst:.1e}  bound {bound:.1e}{'' if worst <= bound else '  <- apart'}"
            )
        lines += [
            f"logits: worst {self.max_logit_diff:.1e}, bound {self.logit_tolerance:.1e}",
            f"gradients: worst {self.max_grad_diff:.1e} of {self.num_gradients_compared}"
            f" ({self.max_grad_diff_parameter}), bound 1.0e-04",
            f"greedy tokens: {self.greedy_tokens}",
            *self.notes,
            "the same" if self.ok else f"NOT the same; they first part at {self.first_mismatch or 'the logits'}",
        ]
        return "\n".join(lines)


def verify(source: str | Path) -> VerificationResult:
    """Compare a checkpoint with transformers' reading of it."""
    checkpoint = load(source, dtype=torch.float32)
    peer = _load_transformers_model(checkpoint, resolve_checkpoint_path(source))
    ours = checkpoint.model
    inputs = _random_inputs(checkpoint)
    for parameter in ours.parameters():
        parameter.grad = None
    mine, my_layers = _forward_cutaway(ours, inputs)
    theirs, their_layers = _forward_transformers(peer, inputs, ours)
    slack = _eager_sdpa_diff(peer, inputs, ours, theirs)
    real = inputs["target_mask"] if "target_mask" in inputs else inputs["mask"]
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)) * real[..., None]
    for out in (mine, theirs):
        torch.autograd.backward((out * weight).sum())
    worst, at, compared = _compare_gradients(checkpoint, peer)
    layers = [
        (name, _max_abs_diff(a, b, mask), _tolerance(b, slack))
        for (name, a, mask), b in zip(my_layers, their_layers, strict=False)
    ]
    return VerificationResult(
        source=str(source),
        max_logit_diff=_max_abs_diff(mine.detach(), theirs.detach(), real),
        logit_tolerance=_tolerance(theirs, slack),
        layer_diffs=layers,
        max_grad_diff=worst,
        max_grad_diff_parameter=at,
        num_gradients_compared=compared,
        greedy_tokens=_compare_greedy_tokens(checkpoint, peer, inputs),
    )


def _load_transformers_model(checkpoint: Checkpoint, path: Path) -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise InputError(
            "--verify compares with transformers, which is not installed; pip install transformers"
        ) from None
    config = checkpoint.config
    if isinstance(config, EncoderDecoder):
        auto = transformers.AutoModelForSeq2SeqLM
    elif isinstance(config, Encoder):
        auto = transformers.AutoModel if config.head.kind == "none" else transformers.AutoModelForMaskedLM
    else:
        auto = transformers.AutoModelForCausalLM
    where: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not (path / "config.json").exists() and path.is_dir():
        raise InputError(
            f"'{path}' is cutaway's own directory, which transformers does not open; convert it to hf first"
        )
    folder = path.parent if path.is_file() else path
    where |= {"trust_remote_code": False} if path.is_file() else {"trust_remote_code": False, "use_safetensors": True}
    try:
        with redirect_stderr(StringIO()):  # its progress bars
            return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **where).eval()
    except Exception as error:  # whatever it is, it is the other library's
        why = f"transformers does not open '{path}', so there is nothing to compare with: {format_error(error)}"
        raise InputError(why) from None


def _random_inputs(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Random tokens in rows of several lengths, padded on the right."""
    g = torch.Generator().manual_seed(0)
    config = checkpoint.config
    limits = [getattr(stack.embedding.position, "length", SEQ_LEN) for stack in config.stacks.values()]
    length = min(SEQ_LEN, *limits)
    lengths = torch.tensor([length, max(1, length - 5), max(1, length // 3)])
    mask = torch.arange(length)[None] < lengths[:, None]
    low = min(5, config.vocab_size - 1)
    tokens = torch.randint(low, config.vocab_size, (BATCH_SIZE, length), generator=g)
    if not isinstance(config, EncoderDecoder):
        return {"tokens": tokens, "mask": mask}
    source = torch.randint(low, config.source_vocab_size or config.vocab_size, (BATCH_SIZE, length), generator=g)
    return {"tokens": source, "mask": mask, "target": tokens, "target_mask": mask.flip(0)}


def _forward_cutaway(model: Transformer, inputs: dict[str, Tensor]) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
    """Logits (or vectors), and what leaves the embedding and each block."""
    seen: list[tuple[str, Tensor, Tensor]] = []
    hooks = []
    for side, stack in model.stacks.items():
        mask = inputs["target_mask"] if side == "decoder" and "target" in inputs else inputs["mask"]
        names = [("embed", stack.embed), *((f"blocks.{i}", block) for i, block in enumerate(stack.blocks[:-1]))]
        names.append(("final_norm", stack.final_norm))
        for name, module in {id(module): (name, module) for name, module in reversed(names)}.values():
            label = f"{side}.{name}" if len(model.stacks) > 1 else name
            hooks.append(
                module.register_forward_hook(
                    lambda _module, _given, out, label=label, mask=mask: seen.append((label, out.detach(), mask))
                )
            )
    try:
        out = _call_cutaway(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return out, seen


def _call_cutaway(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    if "target" in inputs:
        return model(inputs["tokens"], inputs["target"], inputs["mask"], inputs["target_mask"])
    if isinstance(model.config, Encoder) and model.head is None:
        return model.encode(inputs["tokens"], inputs["mask"])
    return model(inputs["tokens"], inputs["mask"])


def _forward_transformers(peer: Any, inputs: dict[str, Tensor], model: Transformer) -> tuple[Tensor, list[Tensor]]:
    given = {"input_ids": inputs["tokens"], "attention_mask": inputs["mask"].long(), "output_hidden_states": True}
    if "target" in inputs:
        given |= {"decoder_input_ids": inputs["target"], "decoder_attention_mask": inputs["target_mask"].long()}
    if not isinstance(model.config, Encoder):
        given["use_cache"] = False
    out = peer(**given)
    if "target" in inputs:
        states = [*out.encoder_hidden_states, *out.decoder_hidden_states]
    else:
        states = list(out.hidden_states or [])
    result = (
        out.last_hidden_state if isinstance(model.config, Encoder) and model.config.head.kind == "none" else out.logits
    )
    return result, [state.detach() for state in states]


def _eager_sdpa_diff(peer: Any, inputs: dict[str, Tensor], model: Transformer, eager_output: Tensor) -> float:
    """How far the peer is from itself by another kernel."""
    if not getattr(peer, "_supports_sdpa", False):
        return 0.0
    peer.set_attn_implementation("sdpa")
    with torch.no_grad():
        other = _forward_transformers(peer, inputs, model)[0]
    peer.set_attn_implementation("eager")
    mask = inputs["target_mask"] if "target_mask" in inputs else inputs["mask"]
    return _max_abs_diff(eager_output.detach(), other, mask)


def _max_abs_diff(a: Tensor, b: Tensor, mask: Tensor) -> float:
    return float((a - b)[mask].abs().max()) if a.shape == b.shape else float("inf")


def _tolerance(reference: Tensor, eager_sdpa_diff: float) -> float:
    return max(1e-5 * max(1.0, float(reference.detach().abs().max())), 3 * eager_sdpa_diff)


def _compare_gradients(checkpoint: Checkpoint, peer: Any) -> tuple[float, str, int]:
    """Our gradients under their names, beside theirs. Experts, which the peer keeps joined, are left out."""
    family = families()[str(checkpoint.family)]
    shadow = {name: p.grad for name, p in checkpoint.model.named_parameters() if p.grad is not None}
    theirs = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    scale = max((float(grad.norm()) for grad in theirs.values()), default=1.0)
    pad = getattr(peer.config, "pad_token_id", None)
    worst, at, compared = 0.0, "none", 0
    model = checkpoint.model
    values = {name: p.data for name, p in model.named_parameters()}
    try:
        for name, p in model.named_parameters():
            p.data = shadow.get(name, torch.zeros_like(p))
        for names, make, _ in export_weights(family, model):
            for name, mine in zip(names, make(), strict=True):
                other = theirs.get(name)
                if other is None or other.shape != mine.shape:
                    continue
                mine, other = mine.clone(), other.clone()
                if pad is not None and other.ndim == 2 and len(other) == peer.config.vocab_size:
                    mine[pad] = other[pad] = 0  # transformers keeps the padding token's row still
                if re.search("position", name) and other.ndim == 2:
                    mine[:2] = other[:2] = 0  # and the rows of padding positions
                apart = float((mine - other).norm()) / max(float(other.norm()), 1e-3 * scale)
                compared += 1
                if not apart <= worst:
                    worst, at = apart, name
    finally:
        for name, p in model.named_parameters():
            p.data = values[name]
    return worst, at, compared


@torch.no_grad()
def _compare_greedy_tokens(checkpoint: Checkpoint, peer: Any, inputs: dict[str, Tensor]) -> str:
    """A few tokens, each the likeliest, through the cache."""
    model: Any = checkpoint.model
    if isinstance(checkpoint.config, Encoder):
        return "not applicable (encoder)"
    settings: dict[str, Any] = dict.fromkeys(
        ("eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")
    )
    settings |= {
        "max_new_tokens": MAX_NEW_TOKENS,
        "min_new_tokens": MAX_NEW_TOKENS,
        "do_sample": False,
        "num_beams": 1,
        "pad_token_id": 0,
    }
    tokens = inputs["tokens"][:1]
    if "target" in inputs:
        start = torch.full((1, 1), getattr(peer.config, "decoder_start_token_id", None) or 0)
        theirs = peer.generate(tokens, decoder_input_ids=start, **settings)[0, 1:]
        cache = model.new_cache(1, MAX_NEW_TOKENS + 1)
        step = model(tokens, start, cache=cache)[:, -1:].argmax(-1)
        mine = [step]
        while len(mine) < MAX_NEW_TOKENS:
            mine.append(model(None, mine[-1], cache=cache)[:, -1:].argmax(-1))
    else:
        limit = getattr(checkpoint.config.stacks["decoder"].embedding.position, "length", None)
        tokens = tokens if limit is None else tokens[:, : max(1, limit - MAX_NEW_TOKENS)]
        theirs = peer.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, tokens.shape[1] :]
        cache = model.new_cache(1, tokens.shape[1] + MAX_NEW_TOKENS)
        mine = [model(tokens, cache=cache)[:, -1:].argmax(-1)]
        while len(mine) < MAX_NEW_TOKENS:
            mine.append(model(mine[-1], cache=cache)[:, -1:].argmax(-1))
    chosen = torch.cat(mine, 1)[0]
    differ = (chosen != theirs[: len(chosen)]).nonzero()
    return "equal" if not len(differ) else f"part at token {int(differ[0]) + 1} of {MAX_NEW_TOKENS}"
