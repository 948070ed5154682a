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
from cutaway.errors import InputError, first_line
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import find, load
from cutaway.families.registry import families
from cutaway.families.save import exported
from cutaway.model import Transformer

BATCH, LENGTH, NEW = 3, 24, 12


@dataclass
class Verification:
    """How far two implementations of one checkpoint are apart, in fp32."""

    source: str
    logits: float
    """The worst difference of a logit, padded and not."""
    logits_bound: float
    layers: list[tuple[str, float, float]]
    """What leaves each layer: name, worst difference, and its bound."""
    gradients: float
    """The worst relative difference of a parameter's gradient."""
    gradients_at: str
    gradients_compared: int
    tokens: str
    """Greedy tokens: 'equal', where they part, or that there are none."""
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> str | None:
        """The first place where the two part."""
        return next((name for name, worst, bound in self.layers if not worst <= bound), None)

    @property
    def ok(self) -> bool:
        told = self.first is None and self.logits <= self.logits_bound and self.gradients <= 1e-4
        return told and self.tokens in ("equal", "none: an encoder writes no text")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"first": self.first, "ok": self.ok}

    def __str__(self) -> str:
        lines = [f"{self.source} beside transformers, fp32"]
        width = max(len(name) for name, _, _ in self.layers)
        for name, worst, bound in self.layers:
            lines.append(
                f"  {name:<{width}}  worst {worst:.1e}  bound {bound:.1e}{'' if worst <= bound else '  <- apart'}"
            )
        lines += [
            f"logits: worst {self.logits:.1e}, bound {self.logits_bound:.1e}",
            f"gradients: worst {self.gradients:.1e} of {self.gradients_compared} ({self.gradients_at}), bound 1.0e-04",
            f"greedy tokens: {self.tokens}",
            *self.notes,
            "the same" if self.ok else f"NOT the same; they first part at {self.first or 'the logits'}",
        ]
        return "\n".join(lines)


def verify(source: str | Path) -> Verification:
    """Compare a checkpoint with transformers' reading of it."""
    checkpoint = load(source, dtype=torch.float32)
    peer = _peer(checkpoint, find(source))
    ours = checkpoint.model
    inputs = _inputs(checkpoint)
    for parameter in ours.parameters():
        parameter.grad = None
    mine, my_layers = _run_ours(ours, inputs)
    theirs, their_layers = _run_peer(peer, inputs, ours)
    slack = _kernel_slack(peer, inputs, ours, theirs)
    real = inputs["target_mask"] if "target_mask" in inputs else inputs["mask"]
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)) * real[..., None]
    for out in (mine, theirs):
        torch.autograd.backward((out * weight).sum())
    worst, at, compared = _gradients(checkpoint, peer)
    layers = [
        (name, _apart(a, b, mask), _bound(b, slack))
        for (name, a, mask), b in zip(my_layers, their_layers, strict=False)
    ]
    return Verification(
        source=str(source),
        logits=_apart(mine.detach(), theirs.detach(), real),
        logits_bound=_bound(theirs, slack),
        layers=layers,
        gradients=worst,
        gradients_at=at,
        gradients_compared=compared,
        tokens=_greedy(checkpoint, peer, inputs),
    )


def _peer(checkpoint: Checkpoint, path: Path) -> Any:
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
        why = f"transformers does not open '{path}', so there is nothing to compare with: {first_line(error)}"
        raise InputError(why) from None


def _inputs(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Random tokens in rows of several lengths, padded on the right."""
    g = torch.Generator().manual_seed(0)
    config = checkpoint.config
    limits = [getattr(stack.embedding.position, "length", LENGTH) for stack in config.stacks.values()]
    length = min(LENGTH, *limits)
    lengths = torch.tensor([length, max(1, length - 5), max(1, length // 3)])
    mask = torch.arange(length)[None] < lengths[:, None]
    low = min(5, config.vocab_size - 1)
    tokens = torch.randint(low, config.vocab_size, (BATCH, length), generator=g)
    if not isinstance(config, EncoderDecoder):
        return {"tokens": tokens, "mask": mask}
    source = torch.randint(low, config.source_vocab_size or config.vocab_size, (BATCH, length), generator=g)
    return {"tokens": source, "mask": mask, "target": tokens, "target_mask": mask.flip(0)}


def _run_ours(model: Transformer, inputs: dict[str, Tensor]) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
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
        out = _call_ours(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return out, seen


def _call_ours(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    if "target" in inputs:
        return model(inputs["tokens"], inputs["target"], inputs["mask"], inputs["target_mask"])
    if isinstance(model.config, Encoder) and model.head is None:
        return model.encode(inputs["tokens"], inputs["mask"])
    return model(inputs["tokens"], inputs["mask"])


def _run_peer(peer: Any, inputs: dict[str, Tensor], ours: Transformer) -> tuple[Tensor, list[Tensor]]:
    given = {"input_ids": inputs["tokens"], "attention_mask": inputs["mask"].long(), "output_hidden_states": True}
    if "target" in inputs:
        given |= {"decoder_input_ids": inputs["target"], "decoder_attention_mask": inputs["target_mask"].long()}
    if not isinstance(ours.config, Encoder):
        given["use_cache"] = False
    out = peer(**given)
    if "target" in inputs:
        states = [*out.encoder_hidden_states, *out.decoder_hidden_states]
    else:
        states = list(out.hidden_states or [])
    result = (
        out.last_hidden_state if isinstance(ours.config, Encoder) and ours.config.head.kind == "none" else out.logits
    )
    return result, [state.detach() for state in states]


def _kernel_slack(peer: Any, inputs: dict[str, Tensor], ours: Transformer, eager: Tensor) -> float:
    """How far the peer is from itself by another kernel."""
    if not getattr(peer, "_supports_sdpa", False):
        return 0.0
    peer.set_attn_implementation("sdpa")
    with torch.no_grad():
        other = _run_peer(peer, inputs, ours)[0]
    peer.set_attn_implementation("eager")
    mask = inputs["target_mask"] if "target_mask" in inputs else inputs["mask"]
    return _apart(eager.detach(), other, mask)


def _apart(a: Tensor, b: Tensor, mask: Tensor) -> float:
    return float((a - b)[mask].abs().max()) if a.shape == b.shape else float("inf")


def _bound(theirs: Tensor, slack: float) -> float:
    return max(1e-5 * max(1.0, float(theirs.detach().abs().max())), 3 * slack)


def _gradients(checkpoint: Checkpoint, peer: Any) -> tuple[float, str, int]:
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
        for names, make, _ in exported(family, model):
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
def _greedy(checkpoint: Checkpoint, peer: Any, inputs: dict[str, Tensor]) -> str:
    """A few tokens, each the likeliest, through the cache."""
    model: Any = checkpoint.model
    if isinstance(checkpoint.config, Encoder):
        return "none: an encoder writes no text"
    settings: dict[str, Any] = dict.fromkeys(
        ("eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")
    )
    settings |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    tokens = inputs["tokens"][:1]
    if "target" in inputs:
        start = torch.full((1, 1), getattr(peer.config, "decoder_start_token_id", None) or 0)
        theirs = peer.generate(tokens, decoder_input_ids=start, **settings)[0, 1:]
        cache = model.new_cache(1, NEW + 1)
        step = model(tokens, start, cache=cache)[:, -1:].argmax(-1)
        mine = [step]
        while len(mine) < NEW:
            mine.append(model(None, mine[-1], cache=cache)[:, -1:].argmax(-1))
    else:
        limit = getattr(checkpoint.config.stacks["decoder"].embedding.position, "length", None)
        tokens = tokens if limit is None else tokens[:, : max(1, limit - NEW)]
        theirs = peer.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)[0, tokens.shape[1] :]
        cache = model.new_cache(1, tokens.shape[1] + NEW)
        mine = [model(tokens, cache=cache)[:, -1:].argmax(-1)]
        while len(mine) < NEW:
            mine.append(model(mine[-1], cache=cache)[:, -1:].argmax(-1))
    chosen = torch.cat(mine, 1)[0]
    differ = (chosen != theirs[: len(chosen)]).nonzero()
    return "equal" if not len(differ) else f"part at token {int(differ[0]) + 1} of {NEW}"
