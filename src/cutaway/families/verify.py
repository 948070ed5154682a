"""Verify a checkpoint against transformers: hidden states per layer, logits, gradients and greedy tokens."""

import re
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from cutaway.bounded_files import read_json_object
from cutaway.config import (
    Decoder,
    Encoder,
    EncoderDecoder,
    LMHead,
    MultipleChoiceHead,
    SequenceClassificationHead,
)
from cutaway.errors import ConfigError, InputError, format_error
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import load, resolve_checkpoint_path
from cutaway.families.registry import families
from cutaway.families.save import export_weights, has_class_with_head, save
from cutaway.model import Transformer

BATCH_SIZE, SEQ_LEN, MAX_NEW_TOKENS = 3, 24, 12
Peer = Any
"""A PreTrainedModel of transformers, which is not a dependency."""


@dataclass
class VerificationResult:
    """Differences between cutaway and transformers for one checkpoint, in fp32."""

    source: str
    max_logit_diff: float
    """Maximum absolute difference of the logits at tokens that are not padding."""
    logit_tolerance: float
    layer_diffs: list[tuple[str, float, float]]
    """(layer, maximum absolute difference of its output, tolerance)."""
    max_grad_diff: float
    """Maximum over all parameters of ‖difference of the gradients‖ / ‖gradient in transformers‖."""
    max_grad_diff_parameter: str
    num_gradients_compared: int
    greedy_tokens: str
    """Result of greedy decoding: 'equal', 'first difference at token …' or 'not applicable (…)'."""

    @property
    def first_mismatch(self) -> str | None:
        """Name of the first layer whose output differs by more than its tolerance, or None."""
        return next((name for name, diff, bound in self.layer_diffs if not diff <= bound), None)

    @property
    def ok(self) -> bool:
        same_outputs = self.first_mismatch is None and self.max_logit_diff <= self.logit_tolerance
        same_tokens = self.greedy_tokens == "equal" or self.greedy_tokens.startswith("not applicable")
        return same_outputs and same_tokens and self.max_grad_diff <= 1e-4

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"first_mismatch": self.first_mismatch, "ok": self.ok}

    def __str__(self) -> str:
        lines = [f"{self.source}: cutaway and transformers compared in fp32"]
        width = max(len(name) for name, _, _ in self.layer_diffs)
        for name, diff, bound in self.layer_diffs:
            mark = "" if diff <= bound else "  <- DIFF"
            lines.append(f"  {name:<{width}}  max diff {diff:.1e}  tolerance {bound:.1e}{mark}")
        lines += [
            f"logits: max diff {self.max_logit_diff:.1e}, tolerance {self.logit_tolerance:.1e}",
            f"gradients: max relative diff {self.max_grad_diff:.1e} over {self.num_gradients_compared} tensors"
            f" ({self.max_grad_diff_parameter}), tolerance 1.0e-04",
            f"greedy tokens: {self.greedy_tokens}",
            "equal" if self.ok else f"NOT equal; the first difference is at {self.first_mismatch or 'the logits'}",
        ]
        return "\n".join(lines)


def verify(source: str | Path) -> VerificationResult:
    """Compare a checkpoint loaded by cutaway with the same checkpoint loaded by transformers, in fp32.

    transformers opens a dequantized copy of a quantized checkpoint."""
    checkpoint = load(source, dtype=torch.float32)
    with TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        path = resolve_checkpoint_path(source)
        if _is_quantized(path):
            path = save(checkpoint, Path(directory) / "dequantized")
        peer = _load_transformers_model(checkpoint, path)
    model = checkpoint.model
    inputs = _random_inputs(checkpoint)
    for parameter in model.parameters():
        parameter.grad = None
    logits, layer_outputs = _forward_cutaway(model, inputs)
    peer_logits, peer_layer_outputs = _forward_transformers(peer, inputs, model)
    eager_sdpa_diff = _eager_sdpa_diff(peer, inputs, model, peer_logits)
    mask = inputs.get("target_mask", inputs["mask"])
    mask = mask if logits.ndim == 3 else torch.ones(logits.shape[:1], dtype=torch.bool)  # one output per sequence
    weight = torch.randn(peer_logits.shape, generator=torch.Generator().manual_seed(1)) * mask[..., None]
    for out in (logits, peer_logits):
        torch.autograd.backward((out * weight).sum())
    worst, key, compared = _compare_gradients(checkpoint, peer)
    layers = [
        (name, _max_abs_diff(a, b, layer_mask), _tolerance(b, eager_sdpa_diff))
        for (name, a, layer_mask), b in zip(layer_outputs, peer_layer_outputs, strict=False)
    ]
    return VerificationResult(
        source=str(source),
        max_logit_diff=_max_abs_diff(logits.detach(), peer_logits.detach(), mask),
        logit_tolerance=_tolerance(peer_logits, eager_sdpa_diff),
        layer_diffs=layers,
        max_grad_diff=worst,
        max_grad_diff_parameter=key,
        num_gradients_compared=compared,
        greedy_tokens=_compare_greedy_tokens(checkpoint, peer, inputs),
    )


def _is_quantized(path: Path) -> bool:
    """Whether the weights of a directory are quantized. transformers needs other packages for most methods, and its
    products with quantized weights are not those of fp32, so that it opens a dequantized copy."""
    if not (path / "config.json").is_file():
        return False
    return read_json_object(path / "config.json", ConfigError).get("quantization_config") is not None


def _load_transformers_model(checkpoint: Checkpoint, path: Path) -> Peer:
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise InputError("verify needs transformers, which is not installed; pip install transformers") from None
    config = checkpoint.config
    if isinstance(config.head, MultipleChoiceHead) or (
        isinstance(config, EncoderDecoder) and not isinstance(config.head, LMHead)
    ):
        raise InputError(
            f"verify does not compare an {config.form} with a head of kind '{config.head.kind}'; save it with ct.save,"
            " and compare the outputs of model(...) with those of transformers"
        )
    if has_class_with_head(config) and not isinstance(config.head, LMHead):
        auto = getattr(transformers, families()[str(checkpoint.family)].architecture_for(config))
    elif not has_class_with_head(config):
        auto = transformers.AutoModel
    elif isinstance(config, EncoderDecoder):
        auto = transformers.AutoModelForSeq2SeqLM
    elif isinstance(config, Encoder):
        auto = transformers.AutoModelForMaskedLM
    else:
        auto = transformers.AutoModelForCausalLM
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
    if path.is_file():
        folder = path.parent
        options["gguf_file"] = path.name
    else:
        folder = path
        options["use_safetensors"] = True
        if not (path / "config.json").exists():
            raise InputError(
                f"'{path}' is in the native format, which transformers cannot read; convert it with --to hf"
            )
    try:
        with redirect_stderr(StringIO()):  # progress bars of transformers
            return auto.from_pretrained(folder, **options).eval()
    except Exception as error:  # any error of transformers
        raise InputError(f"transformers cannot open '{path}', so nothing is compared: {format_error(error)}") from None


def _random_inputs(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """A batch of random tokens with masks: sequences of different lengths, padded on the right."""
    g = torch.Generator().manual_seed(0)
    config = checkpoint.config
    limits = [getattr(stack.embedding.position, "length", SEQ_LEN) for stack in config.stacks.values()]
    length = min(SEQ_LEN, *limits)
    lengths = torch.tensor([length, max(1, length - 5), max(1, length // 3)])
    mask = torch.arange(length)[None] < lengths[:, None]
    low = min(5, config.vocab_size - 1)
    tokens = torch.randint(low, config.vocab_size, (BATCH_SIZE, length), generator=g)
    pad = checkpoint.hf_config.get("pad_token_id")
    if isinstance(config, Decoder) and isinstance(config.head, SequenceClassificationHead):
        # transformers finds the last token of a sequence by the padding token, without which it takes one sequence.
        if not isinstance(pad, int):
            return {"tokens": tokens[:1], "mask": mask[:1]}
        tokens = torch.where(mask, torch.where(tokens == pad, (pad + 1) % config.vocab_size, tokens), pad)
    if not isinstance(config, EncoderDecoder):
        return {"tokens": tokens, "mask": mask}
    source = torch.randint(low, config.source_vocab_size or config.vocab_size, (BATCH_SIZE, length), generator=g)
    return {"tokens": source, "mask": mask, "target": tokens, "target_mask": mask.flip(0)}


def _forward_cutaway(model: Transformer, inputs: dict[str, Tensor]) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
    """Return the logits (or hidden states) and (name, output, mask) of the embedding, each block and the final norm."""
    outputs: list[tuple[str, Tensor, Tensor]] = []
    hooks = []
    for side, stack in model.stacks.items():
        mask = inputs["target_mask"] if side == "decoder" and "target" in inputs else inputs["mask"]
        prefix = f"{side}." if len(model.stacks) > 1 else ""
        names = [("embed", stack.embed), *((f"blocks.{i}", block) for i, block in enumerate(stack.blocks[:-1]))]
        names.append(("final_norm", stack.final_norm))
        for name, module in {id(module): (name, module) for name, module in reversed(names)}.values():

            def record(_: object, args: object, out: Tensor, name: str = prefix + name, mask: Tensor = mask) -> None:
                outputs.append((name, out.detach(), mask))

            hooks.append(module.register_forward_hook(record))
    try:
        forward = model.per_token_output if _is_base_model(model) else model
        out = forward(*(inputs[name] for name in ("tokens", "target", "mask", "target_mask") if name in inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return out, outputs


def _forward_transformers(peer: Peer, inputs: dict[str, Tensor], model: Transformer) -> tuple[Tensor, list[Tensor]]:
    arguments = {"input_ids": inputs["tokens"], "attention_mask": inputs["mask"].long(), "output_hidden_states": True}
    if "target" in inputs:
        arguments |= {"decoder_input_ids": inputs["target"], "decoder_attention_mask": inputs["target_mask"].long()}
    if not isinstance(model.config, Encoder):
        arguments["use_cache"] = False
    out = peer(**arguments)
    if "target" in inputs:
        states = [*out.encoder_hidden_states, *out.decoder_hidden_states]
    else:
        states = list(out.hidden_states or [])
    result = out.last_hidden_state if _is_base_model(model) else out.logits
    return result, [state.detach() for state in states]


def _is_base_model(model: Transformer) -> bool:
    return not has_class_with_head(model.config)


def _eager_sdpa_diff(peer: Peer, inputs: dict[str, Tensor], model: Transformer, eager_output: Tensor) -> float:
    """Maximum absolute difference of the outputs of transformers with eager and with SDPA attention."""
    if not getattr(peer, "_supports_sdpa", False):
        return 0.0
    peer.set_attn_implementation("sdpa")
    with torch.no_grad():
        other = _forward_transformers(peer, inputs, model)[0]
    peer.set_attn_implementation("eager")
    mask = inputs.get("target_mask", inputs["mask"])
    mask = mask if other.ndim == 3 else torch.ones(other.shape[:1], dtype=torch.bool)
    return _max_abs_diff(eager_output.detach(), other, mask)


def _max_abs_diff(a: Tensor, b: Tensor, mask: Tensor) -> float:
    return float((a - b)[mask].abs().max()) if a.shape == b.shape else float("inf")


def _tolerance(reference: Tensor, eager_sdpa_diff: float) -> float:
    return max(1e-5 * max(1.0, float(reference.detach().abs().max())), 3 * eager_sdpa_diff)


def _compare_gradients(checkpoint: Checkpoint, peer: Peer) -> tuple[float, str, int]:
    """Compare gradients by checkpoint key; return (maximum relative difference, its key, number of tensors compared).

    Tensors that transformers stores in another shape (fused experts) are skipped.
    """
    family = families()[str(checkpoint.family)]
    gradients = {name: p.grad for name, p in checkpoint.model.named_parameters() if p.grad is not None}
    peer_gradients = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    scale = max((float(grad.norm()) for grad in peer_gradients.values()), default=1.0)
    pad = getattr(peer.config, "pad_token_id", None)
    worst, worst_key, compared = 0.0, "none", 0
    model = checkpoint.model
    values = {name: p.data for name, p in model.named_parameters()}
    try:
        for name, p in model.named_parameters():
            p.data = gradients.get(name, torch.zeros_like(p))
        for names, convert, _ in export_weights(family, model):
            for name, grad in zip(names, convert(), strict=True):
                peer_grad = peer_gradients.get(name)
                if peer_grad is None or peer_grad.shape != grad.shape:
                    continue
                grad, peer_grad = grad.clone(), peer_grad.clone()
                if pad is not None and peer_grad.ndim == 2 and len(peer_grad) == peer.config.vocab_size:
                    grad[pad] = peer_grad[pad] = 0  # transformers has no gradient for the padding token
                if re.search("position", name) and peer_grad.ndim == 2:
                    grad[:2] = peer_grad[:2] = 0  # and none for the padding positions
                diff = float((grad - peer_grad).norm()) / max(float(peer_grad.norm()), 1e-3 * scale)
                compared += 1
                if not diff <= worst:
                    worst, worst_key = diff, name
    finally:
        for name, p in model.named_parameters():
            p.data = values[name]
    return worst, worst_key, compared


@torch.no_grad()
def _compare_greedy_tokens(checkpoint: Checkpoint, peer: Peer, inputs: dict[str, Tensor]) -> str:
    """Compare greedy decoding of MAX_NEW_TOKENS tokens with a KV cache; return `VerificationResult.greedy_tokens`."""
    model = checkpoint.model
    if isinstance(checkpoint.config, Encoder):
        return "not applicable (encoder)"
    if not model.has_lm_head:
        return "not applicable (no LM head)"
    generate = partial(
        peer.generate,
        **dict.fromkeys(("eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")),
        max_new_tokens=MAX_NEW_TOKENS,
        min_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
    )
    tokens = inputs["tokens"][:1]
    if "target" in inputs:
        start = torch.full((1, 1), getattr(peer.config, "decoder_start_token_id", None) or 0)
        peer_tokens = generate(tokens, decoder_input_ids=start)[0, 1:]
        cache = model.new_cache(1, MAX_NEW_TOKENS + 1)
        logits = model(tokens, start, cache=cache)
    else:
        limit = getattr(checkpoint.config.stacks["decoder"].embedding.position, "length", None)
        tokens = tokens if limit is None else tokens[:, : max(1, limit - MAX_NEW_TOKENS)]
        peer_tokens = generate(tokens, attention_mask=torch.ones_like(tokens))[0, tokens.shape[1] :]
        cache = model.new_cache(1, tokens.shape[1] + MAX_NEW_TOKENS)
        logits = model(tokens, cache=cache)
    sampled = [logits[:, -1:].argmax(-1)]
    while len(sampled) < MAX_NEW_TOKENS:
        token = (None, sampled[-1]) if "target" in inputs else (sampled[-1],)
        sampled.append(model(*token, cache=cache)[:, -1:].argmax(-1))
    chosen = torch.cat(sampled, 1)[0]
    differ = (chosen != peer_tokens[: len(chosen)]).nonzero()
    return "equal" if not len(differ) else f"first difference at token {int(differ[0]) + 1} of {MAX_NEW_TOKENS}"
