"""Parity of a family with transformers: logits, padding, gradients, greedy decoding, save and load."""

import copy
import json
import math
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.activation_parity import check_sites, compare_activations
from torch import Tensor

import cutaway as ct
from cutaway.families import families
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.config_tree import diff_configs

transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore")

BATCH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
"""Scalings that transformers selects per batch and keeps between calls; cutaway selects them per sequence."""


@dataclass
class PeerModel:
    """A transformers config, and how to build and call its model."""

    config: Any
    auto_class: Any = transformers.AutoModelForCausalLM
    long_seq_len: int = 0
    """Additional sequence length of the comparison (for example beyond the original context); 0 for none."""
    left_padding: bool = True
    pass_position_ids: bool = True
    """Whether position_ids must be passed for padded input (otherwise computed by the peer, or not used)."""
    frozen: tuple[str, ...] = ()
    """Substrings of parameter names that are not randomized."""
    skip_eager: bool = False
    """Whether to skip the eager attention of the peer, which is known to be wrong."""
    use_cache: bool = True
    """Whether the peer generates with its KV cache (which keeps all keys if the window is 1: `[-1 + 1 :]`)."""
    modify_model: Any = None
    """Function that modifies the peer before it is saved."""
    compare_generate: bool = True
    """Whether generate() of the peer works (not if the decoder has more layers than the encoder)."""
    unused_parameters: tuple[str, ...] = ()
    """Parameters that the peer does not use; they need not round-trip."""


def rng(seed: int) -> random.Random:
    return random.Random(seed)


def randomize_weights(model: Any, seed: int, frozen: tuple[str, ...] = ()) -> None:
    """Randomize all weights: a zero bias or a gain of one would hide a mistake."""
    g = torch.Generator().manual_seed(seed)
    randomized: set[int] = set()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, p in tensors:
            is_buffer = not isinstance(p, torch.nn.Parameter)
            if id(p) in randomized or any(part in name for part in frozen):
                continue
            if is_buffer and not any(part in name for part in ("correction_bias", "final_logits_bias")):
                continue
            randomized.add(id(p))
            noise = torch.randn(p.shape, generator=g)
            lower_name = name.lower()
            # A matrix is a norm's gain only if its own module is a norm: DBRX has attention in `norm_attn_norm`.
            norm_name = lower_name if p.ndim < 2 else lower_name.split(".")[-2:][0]
            is_norm = "norm" in norm_name or ".ln" in norm_name or "ln_" in norm_name
            if is_norm and name.endswith("weight"):
                p.copy_((0.0 if "gemma" in model.config.model_type else 1.0) + 0.3 * noise)
            elif p.ndim < 2 or "bias" in lower_name.rsplit(".", 1)[-1]:
                p.copy_(0.3 * noise)
            elif any(part in lower_name for part in ("emb", "wte", "wpe", "shared.", "relative")):
                p.copy_(0.7 * noise)
            else:
                p.copy_(noise * 1.2 / math.sqrt(min(p.shape[-1], p.shape[-2])))


def padding_masks(batch: int, length: int) -> Tensor:
    """Right-padding masks of several lengths."""
    sizes = torch.tensor([length, max(1, length - 4), max(1, length // 3)][:batch])
    return torch.arange(length)[None] < sizes[:, None]


def assert_close(actual: Tensor, expected: Tensor, sdpa_diff: float, label: str) -> None:
    assert actual.shape == expected.shape, (label, actual.shape, expected.shape)
    assert torch.isfinite(actual).all(), f"{label}: not finite"
    tolerance = max(1e-5 * max(1.0, expected.abs().max().item()), 3 * sdpa_diff)
    diff = (actual - expected).abs().max().item()
    assert diff <= tolerance, f"{label}: max diff {diff:.2e}, tolerance {tolerance:.2e}"


def has_batch_dependent_rope(config: Any) -> bool:
    return any(kind in str(getattr(config, "rope_parameters", "")) for kind in BATCH_DEPENDENT_ROPE_TYPES)


def check_family(peer: PeerModel, directory: Path, seed: int = 0) -> Checkpoint:
    """Run all comparisons for one random config of a family."""
    torch.manual_seed(seed)
    config = peer.config
    attention = "sdpa" if peer.skip_eager else "eager"
    model = peer.auto_class.from_config(config, attn_implementation=attention).float().eval()
    randomize_weights(model, seed, peer.frozen)
    if peer.modify_model is not None:
        peer.modify_model(model)
    model.save_pretrained(directory / "transformers")
    checkpoint = ct.load(directory / "transformers")
    assert checkpoint.family == config.model_type
    assert checkpoint.load_report is not None
    assert checkpoint.load_report.ok
    compare = {"decoder": compare_decoder, "encoder": compare_encoder, "encoder-decoder": compare_encoder_decoder}
    compare[checkpoint.config.form](peer, model, checkpoint, seed)
    if seed == 0:
        tokens = torch.randint(5, get_vocab_size(config), (2, 9), generator=torch.Generator().manual_seed(seed))
        inputs = (tokens, tokens[:, :7]) if checkpoint.config.form == "encoder-decoder" else (tokens,)
        # Some models return attention patterns only with output_attentions=True, which changes the model; so copy it.
        compare_activations(copy.deepcopy(model), checkpoint.model, inputs, output_attentions=not peer.skip_eager)
        check_sites(checkpoint.model, inputs)
    check_export(peer, model, checkpoint, directory, seed)
    return checkpoint


def get_vocab_size(config: Any) -> int:
    """Number of token ids that are valid in both the source and the target vocabulary."""
    return int(min(config.vocab_size, getattr(config, "decoder_vocab_size", None) or config.vocab_size))


def call_peer(model: Any, stateful: bool, **inputs: Any) -> Any:
    """Call the peer; on a copy if it keeps state between calls."""
    return (copy.deepcopy(model) if stateful else model)(**inputs)


def eager_sdpa_diff(peer: PeerModel, model: Any, run: Any) -> float:
    """Maximum difference between eager and SDPA attention of the peer."""
    if peer.skip_eager or not model._supports_sdpa:
        return 0.0
    a = run()
    model.set_attn_implementation("sdpa")
    b = run()
    model.set_attn_implementation("eager")
    return float((a - b).abs().max()) if torch.isfinite(b).all() else 0.0


def compare_decoder(peer: PeerModel, model: Any, checkpoint: Checkpoint, seed: int) -> None:
    cutaway_model, stateful = checkpoint.model, has_batch_dependent_rope(peer.config)
    g = torch.Generator().manual_seed(seed)
    batch, length = 3, 13
    tokens = torch.randint(5, get_vocab_size(peer.config), (batch, length), generator=g)
    options = {"use_cache": False}

    def peer_output(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and stateful:  # one sequence at a time, without padding
            out = torch.zeros(*tokens.shape, get_vocab_size(peer.config))
            for row, row_mask in enumerate(mask):
                out[row, row_mask] = call_peer(
                    model, True, input_ids=tokens[row : row + 1, row_mask], **options
                ).logits[0]
            return out
        arguments: dict[str, Any] = {} if mask is None else {"attention_mask": mask.long()}
        if mask is not None and peer.pass_position_ids:
            arguments["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return call_peer(model, stateful, input_ids=tokens, **arguments, **options).logits

    with torch.no_grad():
        sdpa_diff = eager_sdpa_diff(peer, model, lambda: peer_output(tokens))
        assert_close(cutaway_model(tokens), peer_output(tokens), sdpa_diff, "logits")
        assert_close(cutaway_model(tokens[:1, :1]), peer_output(tokens[:1, :1]), sdpa_diff, "one token")
        right_padding = padding_masks(batch, length)
        for side, mask in (("right", right_padding), *([("left", right_padding.flip(1))] if peer.left_padding else [])):
            assert_close(
                cutaway_model(tokens, mask)[mask], peer_output(tokens, mask)[mask], sdpa_diff, f"padded on the {side}"
            )
        if peer.long_seq_len:
            long_tokens = torch.randint(5, get_vocab_size(peer.config), (2, peer.long_seq_len), generator=g)
            assert_close(
                cutaway_model(long_tokens),
                peer_output(long_tokens),
                max(sdpa_diff, eager_sdpa_diff(peer, model, lambda: peer_output(long_tokens))),
                "long",
            )
    if not stateful:
        weight = torch.randn(batch, length, get_vocab_size(peer.config), generator=g) * right_padding[..., None]
        model.zero_grad()
        (peer_output(tokens, right_padding) * weight).sum().backward()
        cutaway_model.zero_grad()
        (cutaway_model(tokens, right_padding) * weight).sum().backward()
    else:
        weight = torch.randn(1, length, get_vocab_size(peer.config), generator=g)
        model.zero_grad()
        (model(tokens[:1], **options).logits * weight).sum().backward()
        cutaway_model.zero_grad()
        (cutaway_model(tokens[:1]) * weight).sum().backward()
    mask = right_padding.flip(1) if peer.left_padding and not stateful else None
    compare_greedy_decoder(
        model, cutaway_model, tokens if mask is not None else tokens[:1, :6], mask, use_cache=peer.use_cache
    )


def compare_greedy_decoder(
    model: Any, cutaway_model: Any, tokens: Tensor, mask: Tensor | None, max_new_tokens: int = 8, use_cache: bool = True
) -> None:
    with torch.no_grad():
        expected = copy.deepcopy(model).generate(
            tokens,
            attention_mask=torch.ones_like(tokens) if mask is None else mask.long(),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=use_cache,
            eos_token_id=None,
            pad_token_id=0,
        )[:, tokens.shape[1] :]
        cache = cutaway_model.new_cache(len(tokens), tokens.shape[1] + max_new_tokens)
        token = cutaway_model(tokens, mask, cache=cache)[:, -1].argmax(-1)
        generated = [token]
        for _ in range(max_new_tokens - 1):
            generated.append(cutaway_model(generated[-1][:, None], cache=cache)[:, -1].argmax(-1))
    assert torch.equal(torch.stack(generated, 1), expected), "greedy tokens"


def compare_encoder(peer: PeerModel, model: Any, checkpoint: Checkpoint, seed: int) -> None:
    cutaway_model: Any = checkpoint.model
    g = torch.Generator().manual_seed(seed)
    batch, length = 3, 13
    tokens = torch.randint(5, get_vocab_size(peer.config), (batch, length), generator=g)
    has_head = cutaway_model.head is not None
    pad = getattr(peer.config, "pad_token_id", None) or 0

    def peer_output(tokens: Tensor, mask: Tensor | None = None, **extra: Any) -> Tensor:
        if mask is not None:
            extra["attention_mask"] = mask.long()
            if peer.pass_position_ids:
                extra["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        out = model(input_ids=tokens, **extra)
        return out.logits if has_head else out.last_hidden_state

    def output(tokens: Tensor, mask: Tensor | None = None, **extra: Any) -> Tensor:
        return (cutaway_model if has_head else cutaway_model.encode)(tokens, mask, **extra)

    right_padding = padding_masks(batch, length)
    with torch.no_grad():
        sdpa_diff = eager_sdpa_diff(peer, model, lambda: peer_output(tokens))
        assert_close(output(tokens), peer_output(tokens), sdpa_diff, "output")
        assert_close(output(tokens[:1, :1]), peer_output(tokens[:1, :1]), sdpa_diff, "one token")
        for side, mask in (("right", right_padding), *([("left", right_padding.flip(1))] if peer.left_padding else [])):
            padded = torch.where(mask, tokens, pad)
            assert_close(
                output(padded, mask)[mask], peer_output(padded, mask)[mask], sdpa_diff, f"padded on the {side}"
            )
            if cutaway_model.pooler is not None and side == "right":
                out = model(input_ids=padded, attention_mask=mask.long()).pooler_output
                assert_close(cutaway_model.pool(padded, mask), out, sdpa_diff, "pooled")
        if peer.long_seq_len:
            long_tokens = torch.randint(5, get_vocab_size(peer.config), (2, peer.long_seq_len), generator=g)
            assert_close(
                output(long_tokens),
                peer_output(long_tokens),
                max(sdpa_diff, eager_sdpa_diff(peer, model, lambda: peer_output(long_tokens))),
                "long",
            )
        num_token_types = checkpoint.config.stacks["encoder"].embedding.token_types
        if num_token_types > 1:
            token_types = torch.randint(0, num_token_types, tokens.shape, generator=g)
            types_sdpa_diff = eager_sdpa_diff(peer, model, lambda: peer_output(tokens, token_type_ids=token_types))
            assert_close(
                output(tokens, token_types=token_types),
                peer_output(tokens, token_type_ids=token_types),
                max(sdpa_diff, types_sdpa_diff),
                "types",
            )
    padded = torch.where(right_padding, tokens, pad)
    out = peer_output(padded, right_padding)
    weight = torch.randn(out.shape, generator=g) * right_padding[..., None]
    model.zero_grad()
    (out * weight).sum().backward()
    cutaway_model.zero_grad()
    (output(padded, right_padding) * weight).sum().backward()


def compare_encoder_decoder(peer: PeerModel, model: Any, checkpoint: Checkpoint, seed: int) -> None:
    cutaway_model: Any = checkpoint.model
    g = torch.Generator().manual_seed(seed)
    source = torch.randint(5, get_vocab_size(peer.config), (3, 15), generator=g)
    target = torch.randint(5, get_vocab_size(peer.config), (3, 9), generator=g)
    source_mask, target_mask = padding_masks(3, 15), padding_masks(3, 9)

    def peer_output(source: Tensor, target: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        masks = {} if a is None or b is None else {"attention_mask": a.long(), "decoder_attention_mask": b.long()}
        return model(input_ids=source, decoder_input_ids=target, use_cache=False, **masks).logits

    with torch.no_grad():
        sdpa_diff = eager_sdpa_diff(peer, model, lambda: peer_output(source, target))
        assert_close(cutaway_model(source, target), peer_output(source, target), sdpa_diff, "logits")
        assert_close(
            cutaway_model(source[:1, :1], target[:1, :1]),
            peer_output(source[:1, :1], target[:1, :1]),
            sdpa_diff,
            "one token",
        )
        assert_close(
            cutaway_model(source, target, source_mask, target_mask)[target_mask],
            peer_output(source, target, source_mask, target_mask)[target_mask],
            sdpa_diff,
            "right",
        )
        if peer.left_padding:
            a, b = source_mask.flip(1), target_mask.flip(1)
            assert_close(
                cutaway_model(source, target, a, b)[b],
                peer_output(source, target, a, b)[b],
                sdpa_diff,
                "padded on the left",
            )
        if peer.long_seq_len:
            long_tokens = torch.randint(5, get_vocab_size(peer.config), (2, peer.long_seq_len), generator=g)
            long_sdpa_diff = eager_sdpa_diff(peer, model, lambda: peer_output(long_tokens, long_tokens))
            assert_close(
                cutaway_model(long_tokens, long_tokens),
                peer_output(long_tokens, long_tokens),
                max(sdpa_diff, long_sdpa_diff),
                "long",
            )
    out = peer_output(source, target, source_mask, target_mask)
    weight = torch.randn(out.shape, generator=g) * target_mask[..., None]
    model.zero_grad()
    (out * weight).sum().backward()
    cutaway_model.zero_grad()
    (cutaway_model(source, target, source_mask, target_mask) * weight).sum().backward()
    if peer.compare_generate:
        compare_greedy_encoder_decoder(model, cutaway_model, source, source_mask)


def compare_greedy_encoder_decoder(
    model: Any, cutaway_model: Any, source: Tensor, source_mask: Tensor, max_new_tokens: int = 8
) -> None:
    start = 2
    with torch.no_grad():
        expected = copy.deepcopy(model).generate(
            source,
            attention_mask=source_mask.long(),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
            decoder_start_token_id=start,
            forced_bos_token_id=None,
            forced_eos_token_id=None,
            bad_words_ids=None,
        )[:, 1:]
        cache = cutaway_model.new_cache(len(source), max_new_tokens + 1)
        token = torch.full((len(source), 1), start)
        encoder_inputs: Any = (source, source_mask)
        generated = []
        for _ in range(max_new_tokens):
            token = cutaway_model(encoder_inputs[0], token, encoder_inputs[1], cache=cache)[:, -1:].argmax(-1)
            encoder_inputs = (None, None)
            generated.append(token)
    assert torch.equal(torch.cat(generated, 1), expected), "greedy tokens"


def check_export(peer: PeerModel, model: Any, checkpoint: Checkpoint, directory: Path, seed: int) -> None:
    """Save the checkpoint without its original config.json; assert that transformers and cutaway load it exactly."""
    without_files = replace(checkpoint, hf_config={}, generation_config={}, tokenizer_loader=lambda: None)
    ct.save(without_files, directory / "cutaway", family=checkpoint.family)
    loaded_peer, loading_info = peer.auto_class.from_pretrained(
        directory / "cutaway", attn_implementation=model.config._attn_implementation, output_loading_info=True
    )
    assert not loading_info["missing_keys"], f"not in the export: {sorted(loading_info['missing_keys'])}"
    assert not loading_info["unexpected_keys"], f"not in transformers: {sorted(loading_info['unexpected_keys'])}"
    assert_same_state_dict(loaded_peer.state_dict(), model.state_dict(), peer)
    check_config(peer, loaded_peer.config, checkpoint)
    loaded = ct.load(directory / "cutaway")
    assert loaded.config == checkpoint.config
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name]), name
    check_gradients(peer, model, checkpoint, directory)


def assert_same_state_dict(loaded: dict[str, Tensor], original: dict[str, Tensor], peer: PeerModel) -> None:
    assert loaded.keys() == original.keys()
    for name, tensor in original.items():
        assert name in peer.unused_parameters or torch.equal(loaded[name], tensor), f"after export, {name} differs"


def check_config(peer: PeerModel, written: Any, checkpoint: Checkpoint) -> None:
    """The saved config.json, loaded by transformers, has the original values of all keys of the family."""
    family = families()[str(checkpoint.family)]
    keys = {key for entry in family.fields for key in entry.keys}
    a, b = written.to_dict(), peer.config.to_dict()
    for key in sorted(keys & b.keys()):
        if b[key] is not None:  # null means computed; the computed value is saved
            assert config_values_equal(a.get(key), b[key]), (
                f"config after export: {key} is {a.get(key)!r}, was {b[key]!r}"
            )
    original = families()[str(checkpoint.family)].config_from_hf(checkpoint.hf_config)[0]
    assert ct.config(checkpoint.hf_config).form == original.form


def check_legacy_config(hf_config: dict[str, Any], preset: str | None = None) -> Any:
    """A published config.json is converted as in transformers, and equals the preset."""
    family = families()[hf_config["model_type"]]
    config = family.config_from_hf(hf_config)[0]
    current = transformers.CONFIG_MAPPING[hf_config["model_type"]].from_dict(dict(hf_config))
    assert not diff_configs(config, family.config_from_hf(json.loads(current.to_json_string(use_diff=False)))[0])
    assert preset is None or not diff_configs(config, ct.config(preset))
    return config


def config_values_equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        computed = {"attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "factor"}
        shared = (a.keys() & b.keys()) | ((a.keys() ^ b.keys()) - computed - {"type", "partial_rotary_factor"})
        return all(config_values_equal(a.get(key), b.get(key)) for key in shared - {"dtype"})  # dtype is set by loading
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(config_values_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def check_gradients(peer: PeerModel, model: Any, checkpoint: Checkpoint, directory: Path) -> None:
    """Gradients, saved as weights and loaded by the peer, equal the gradients of the peer."""
    gradient_model = copy.deepcopy(checkpoint.model)
    for (_, p), (_, source) in zip(gradient_model.named_parameters(), checkpoint.model.named_parameters(), strict=True):
        p.data = torch.zeros_like(p) if source.grad is None else source.grad.clone()
    ct.save(Checkpoint(gradient_model, gradient_model.config), directory / "gradients", family=checkpoint.family)
    gradients = dict(peer.auto_class.from_pretrained(directory / "gradients").named_parameters())
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None and p.requires_grad}
    scale = max(p.grad.norm().item() for p in parameters.values())
    for name, p in parameters.items():
        grad, peer_grad = gradients[name].detach().clone(), p.grad.clone()
        pad = getattr(peer.config, "pad_token_id", None)
        if pad is not None and len(peer_grad) == get_vocab_size(peer.config) and peer_grad.ndim == 2:
            grad[pad] = peer_grad[pad] = 0  # the peer has no gradient for the padding token
        if "position" in name and peer_grad.ndim == 2:
            grad, peer_grad = grad[2:], peer_grad[2:]  # nor for padding positions
        weight = parameters.get(f"{name.removesuffix('bias')}weight")
        if name.endswith(".bias") and weight is not None and peer_grad.norm() < 1e-5 * weight.grad.norm():
            # Zero up to rounding: without RoPE, a key bias shifts all scores of a query equally.
            assert grad.norm() <= 1e-4 * weight.grad.norm(), f"gradient of {name}: {grad.norm():.2e}, not 0"
            continue
        diff = (grad - peer_grad).norm().item() / max(peer_grad.norm().item(), 1e-3 * scale)
        assert diff <= 1e-4, f"gradient of {name}: {diff:.2e}"


def check_extra_tensors(
    model: Any, directory: Path, extra: dict[str, Tensor], auto: Any = None, rename: Any = lambda name: name
) -> Checkpoint:
    """A file with extra tensors or other names is loaded as in transformers."""
    randomize_weights(model.float().eval(), 0)
    model.save_pretrained(directory)
    stored = {rename(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(stored | extra, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint = ct.load(directory)
    assert checkpoint.load_report is not None
    assert set(checkpoint.load_report.ignored_weights) >= extra.keys()
    loaded_peer = (auto or transformers.AutoModelForCausalLM).from_pretrained(directory).eval()
    tokens = torch.randint(5, get_vocab_size(model.config), (2, 9), generator=torch.Generator().manual_seed(0))
    is_encoder_decoder = checkpoint.config.form == "encoder-decoder"
    with torch.no_grad():
        expected = loaded_peer(input_ids=tokens, **({"decoder_input_ids": tokens} if is_encoder_decoder else {})).logits
        assert_close(checkpoint.model(*([tokens] * (2 if is_encoder_decoder else 1))), expected, 0.0, "logits")
    return checkpoint
