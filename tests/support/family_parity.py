"""Ours ≡ transformers, for a family: loaded, padded, trained, greedy, written, opened again."""

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
"""Scalings that the peer picks for a whole batch, and remembers between calls; ours go by row."""


@dataclass
class PeerModel:
    """A model of transformers with random weights, and how it wants to be called."""

    config: Any
    auto_class: Any = transformers.AutoModelForCausalLM
    long_seq_len: int = 0
    """Also compare at this length (beyond the original context, say)."""
    left_padding: bool = True
    pass_position_ids: bool = True
    """Whether the peer must be told positions to leave padding out (else it works them out, or has none)."""
    frozen: tuple[str, ...] = ()
    """Parameters left as they are."""
    skip_eager: bool = False
    """The peer's eager path is known to be wrong."""
    use_cache: bool = True
    """Whether the peer generates with its cache (which keeps everything where a window is 1: `[-1 + 1 :]`)."""
    modify_model: Any = None
    """A function that changes the peer's model before it is saved."""
    compare_generate: bool = True
    """Whether the peer's own generate() works (not where an encoder-decoder's decoder is the deeper one)."""
    unused_parameters: tuple[str, ...] = ()
    """Parameters of the peer that nothing reads, so that they need not survive."""


def rng(seed: int) -> random.Random:
    return random.Random(seed)


def randomize_weights(model: Any, seed: int, frozen: tuple[str, ...] = ()) -> None:
    """Weights of a size that keeps every part alive: a zero bias or a gain of one would hide a mistake."""
    g = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, p in named:
            buffer = not isinstance(p, torch.nn.Parameter)
            if id(p) in done or any(part in name for part in frozen):
                continue
            if buffer and not any(part in name for part in ("correction_bias", "final_logits_bias")):
                continue
            done.add(id(p))
            noise = torch.randn(p.shape, generator=g)
            low = name.lower()
            is_norm = "norm" in low or ".ln" in low or "ln_" in low
            if is_norm and name.endswith("weight"):
                p.copy_((0.0 if "gemma" in model.config.model_type else 1.0) + 0.3 * noise)
            elif p.ndim < 2 or "bias" in low.rsplit(".", 1)[-1]:
                p.copy_(0.3 * noise)
            elif any(part in low for part in ("emb", "wte", "wpe", "shared.", "relative")):
                p.copy_(0.7 * noise)
            else:
                p.copy_(noise * 1.2 / math.sqrt(min(p.shape[-1], p.shape[-2])))


def padding_masks(batch: int, length: int) -> Tensor:
    """Masks of several lengths, padded on the right."""
    sizes = torch.tensor([length, max(1, length - 4), max(1, length // 3)][:batch])
    return torch.arange(length)[None] < sizes[:, None]


def assert_close(ours: Tensor, theirs: Tensor, slack: float, what: str) -> None:
    assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
    assert torch.isfinite(ours).all(), f"{what}: not finite"
    bound = max(1e-5 * max(1.0, theirs.abs().max().item()), 3 * slack)
    worst = (ours - theirs).abs().max().item()
    assert worst <= bound, f"{what}: worst difference {worst:.2e}, bound {bound:.2e}"


def has_batch_dependent_rope(config: Any) -> bool:
    return any(kind in str(getattr(config, "rope_parameters", "")) for kind in BATCH_DEPENDENT_ROPE_TYPES)


def check_family(peer: PeerModel, directory: Path, seed: int = 0) -> Checkpoint:
    """Everything that must hold for one random configuration of a family."""
    torch.manual_seed(seed)
    config = peer.config
    first = "sdpa" if peer.skip_eager else "eager"
    model = peer.auto_class.from_config(config, attn_implementation=first).float().eval()
    randomize_weights(model, seed, peer.frozen)
    if peer.modify_model is not None:
        peer.modify_model(model)
    model.save_pretrained(directory / "theirs")
    checkpoint = ct.load(directory / "theirs")
    assert checkpoint.family == config.model_type
    assert checkpoint.load_report is not None
    assert checkpoint.load_report.ok
    compare = {"decoder": compare_decoder, "encoder": compare_encoder, "encoder-decoder": compare_encoder_decoder}
    compare[checkpoint.config.form](peer, model, checkpoint, seed)
    if seed == 0:
        tokens = torch.randint(5, get_vocab_size(config), (2, 9), generator=torch.Generator().manual_seed(seed))
        texts = (tokens, tokens[:, :7]) if checkpoint.config.form == "encoder-decoder" else (tokens,)
        # Some give back patterns only when they are asked to, and those that are asked are changed by it.
        compare_activations(copy.deepcopy(model), checkpoint.model, texts, output_attentions=not peer.skip_eager)
        check_sites(checkpoint.model, texts)
    check_export(peer, model, checkpoint, directory, seed)
    return checkpoint


def get_vocab_size(config: Any) -> int:
    """Tokens that both sides know."""
    return int(min(config.vocab_size, getattr(config, "decoder_vocab_size", None) or config.vocab_size))


def call_peer(model: Any, untimed: bool, **inputs: Any) -> Any:
    """The peer's output; from a copy where it remembers earlier calls."""
    return (copy.deepcopy(model) if untimed else model)(**inputs)


def eager_sdpa_diff(peer: PeerModel, model: Any, run: Any) -> float:
    """How far the peer is from itself by another kernel."""
    if peer.skip_eager or not model._supports_sdpa:
        return 0.0
    a = run()
    model.set_attn_implementation("sdpa")
    b = run()
    model.set_attn_implementation("eager")
    return float((a - b).abs().max()) if torch.isfinite(b).all() else 0.0


def compare_decoder(peer: PeerModel, model: Any, checkpoint: Checkpoint, seed: int) -> None:
    ours, untimed = checkpoint.model, has_batch_dependent_rope(peer.config)
    g = torch.Generator().manual_seed(seed)
    batch, length = 3, 13
    tokens = torch.randint(5, get_vocab_size(peer.config), (batch, length), generator=g)
    kind = {"use_cache": False}

    def theirs(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and untimed:  # row by row, as if alone
            out = torch.zeros(*tokens.shape, get_vocab_size(peer.config))
            for row, kept in enumerate(mask):
                out[row, kept] = call_peer(model, True, input_ids=tokens[row : row + 1, kept], **kind).logits[0]
            return out
        extra: dict[str, Any] = {} if mask is None else {"attention_mask": mask.long()}
        if mask is not None and peer.pass_position_ids:
            extra["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return call_peer(model, untimed, input_ids=tokens, **extra, **kind).logits

    with torch.no_grad():
        slack = eager_sdpa_diff(peer, model, lambda: theirs(tokens))
        assert_close(ours(tokens), theirs(tokens), slack, "logits")
        assert_close(ours(tokens[:1, :1]), theirs(tokens[:1, :1]), slack, "one token")
        right = padding_masks(batch, length)
        for side, mask in (("right", right), *([("left", right.flip(1))] if peer.left_padding else [])):
            assert_close(ours(tokens, mask)[mask], theirs(tokens, mask)[mask], slack, f"padded on the {side}")
        if peer.long_seq_len:
            far = torch.randint(5, get_vocab_size(peer.config), (2, peer.long_seq_len), generator=g)
            assert_close(ours(far), theirs(far), max(slack, eager_sdpa_diff(peer, model, lambda: theirs(far))), "long")
    if not untimed:
        weight = torch.randn(batch, length, get_vocab_size(peer.config), generator=g) * right[..., None]
        model.zero_grad()
        (theirs(tokens, right) * weight).sum().backward()
        ours.zero_grad()
        (ours(tokens, right) * weight).sum().backward()
    else:
        weight = torch.randn(1, length, get_vocab_size(peer.config), generator=g)
        model.zero_grad()
        (model(tokens[:1], **kind).logits * weight).sum().backward()
        ours.zero_grad()
        (ours(tokens[:1]) * weight).sum().backward()
    mask = right.flip(1) if peer.left_padding and not untimed else None
    compare_greedy_decoder(model, ours, tokens if mask is not None else tokens[:1, :6], mask, cached=peer.use_cache)


def compare_greedy_decoder(
    model: Any, ours: Any, tokens: Tensor, mask: Tensor | None, new: int = 8, cached: bool = True
) -> None:
    with torch.no_grad():
        theirs = copy.deepcopy(model).generate(
            tokens,
            attention_mask=torch.ones_like(tokens) if mask is None else mask.long(),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=cached,
            eos_token_id=None,
            pad_token_id=0,
        )[:, tokens.shape[1] :]
        cache = ours.new_cache(len(tokens), tokens.shape[1] + new)
        step = ours(tokens, mask, cache=cache)[:, -1].argmax(-1)
        chosen = [step]
        for _ in range(new - 1):
            chosen.append(ours(chosen[-1][:, None], cache=cache)[:, -1].argmax(-1))
    assert torch.equal(torch.stack(chosen, 1), theirs), "greedy tokens"


def compare_encoder(peer: PeerModel, model: Any, checkpoint: Checkpoint, seed: int) -> None:
    ours: Any = checkpoint.model
    g = torch.Generator().manual_seed(seed)
    batch, length = 3, 13
    tokens = torch.randint(5, get_vocab_size(peer.config), (batch, length), generator=g)
    has_head = ours.head is not None
    pad = getattr(peer.config, "pad_token_id", None) or 0

    def theirs(tokens: Tensor, mask: Tensor | None = None, **extra: Any) -> Tensor:
        if mask is not None:
            extra["attention_mask"] = mask.long()
            if peer.pass_position_ids:
                extra["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        out = model(input_ids=tokens, **extra)
        return out.logits if has_head else out.last_hidden_state

    def mine(tokens: Tensor, mask: Tensor | None = None, **extra: Any) -> Tensor:
        return (ours if has_head else ours.encode)(tokens, mask, **extra)

    right = padding_masks(batch, length)
    with torch.no_grad():
        slack = eager_sdpa_diff(peer, model, lambda: theirs(tokens))
        assert_close(mine(tokens), theirs(tokens), slack, "output")
        assert_close(mine(tokens[:1, :1]), theirs(tokens[:1, :1]), slack, "one token")
        for side, mask in (("right", right), *([("left", right.flip(1))] if peer.left_padding else [])):
            padded = torch.where(mask, tokens, pad)
            assert_close(mine(padded, mask)[mask], theirs(padded, mask)[mask], slack, f"padded on the {side}")
            if ours.pooler is not None and side == "right":
                out = model(input_ids=padded, attention_mask=mask.long()).pooler_output
                assert_close(ours.pool(padded, mask), out, slack, "pooled")
        if peer.long_seq_len:
            far = torch.randint(5, get_vocab_size(peer.config), (2, peer.long_seq_len), generator=g)
            assert_close(mine(far), theirs(far), max(slack, eager_sdpa_diff(peer, model, lambda: theirs(far))), "long")
        types = checkpoint.config.stacks["encoder"].embedding.token_types
        if types > 1:
            kinds = torch.randint(0, types, tokens.shape, generator=g)
            own = eager_sdpa_diff(peer, model, lambda: theirs(tokens, token_type_ids=kinds))
            assert_close(
                mine(tokens, token_types=kinds), theirs(tokens, token_type_ids=kinds), max(slack, own), "types"
            )
    padded = torch.where(right, tokens, pad)
    out = theirs(padded, right)
    weight = torch.randn(out.shape, generator=g) * right[..., None]
    model.zero_grad()
    (out * weight).sum().backward()
    ours.zero_grad()
    (mine(padded, right) * weight).sum().backward()


def compare_encoder_decoder(peer: PeerModel, model: Any, checkpoint: Checkpoint, seed: int) -> None:
    ours: Any = checkpoint.model
    g = torch.Generator().manual_seed(seed)
    source = torch.randint(5, get_vocab_size(peer.config), (3, 15), generator=g)
    target = torch.randint(5, get_vocab_size(peer.config), (3, 9), generator=g)
    seen, wanted = padding_masks(3, 15), padding_masks(3, 9)

    def theirs(source: Tensor, target: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        masks = {} if a is None or b is None else {"attention_mask": a.long(), "decoder_attention_mask": b.long()}
        return model(input_ids=source, decoder_input_ids=target, use_cache=False, **masks).logits

    with torch.no_grad():
        slack = eager_sdpa_diff(peer, model, lambda: theirs(source, target))
        assert_close(ours(source, target), theirs(source, target), slack, "logits")
        assert_close(ours(source[:1, :1], target[:1, :1]), theirs(source[:1, :1], target[:1, :1]), slack, "one token")
        assert_close(
            ours(source, target, seen, wanted)[wanted], theirs(source, target, seen, wanted)[wanted], slack, "right"
        )
        if peer.left_padding:
            a, b = seen.flip(1), wanted.flip(1)
            assert_close(ours(source, target, a, b)[b], theirs(source, target, a, b)[b], slack, "padded on the left")
        if peer.long_seq_len:
            far = torch.randint(5, get_vocab_size(peer.config), (2, peer.long_seq_len), generator=g)
            own = eager_sdpa_diff(peer, model, lambda: theirs(far, far))
            assert_close(ours(far, far), theirs(far, far), max(slack, own), "long")
    out = theirs(source, target, seen, wanted)
    weight = torch.randn(out.shape, generator=g) * wanted[..., None]
    model.zero_grad()
    (out * weight).sum().backward()
    ours.zero_grad()
    (ours(source, target, seen, wanted) * weight).sum().backward()
    if peer.compare_generate:
        compare_greedy_encoder_decoder(model, ours, source, seen)


def compare_greedy_encoder_decoder(model: Any, ours: Any, source: Tensor, seen: Tensor, new: int = 8) -> None:
    start = 2
    with torch.no_grad():
        theirs = copy.deepcopy(model).generate(
            source,
            attention_mask=seen.long(),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
            decoder_start_token_id=start,
            forced_bos_token_id=None,
            forced_eos_token_id=None,
            bad_words_ids=None,
        )[:, 1:]
        cache = ours.new_cache(len(source), new + 1)
        step = torch.full((len(source), 1), start)
        given: Any = (source, seen)
        chosen = []
        for _ in range(new):
            step = ours(given[0], step, given[1], cache=cache)[:, -1:].argmax(-1)
            given = (None, None)
            chosen.append(step)
    assert torch.equal(torch.cat(chosen, 1), theirs), "greedy tokens"


def check_export(peer: PeerModel, model: Any, checkpoint: Checkpoint, directory: Path, seed: int) -> None:
    """Written from the configuration alone, the peer opens it; loaded again, it is the same bit for bit."""
    bare = replace(checkpoint, hf_config={}, generation_config={}, tokenizer_loader=lambda: None)
    ct.save(bare, directory / "ours", family=checkpoint.family)
    opened = peer.auto_class.from_pretrained(directory / "ours", attn_implementation=model.config._attn_implementation)
    assert_same_state_dict(opened.state_dict(), model.state_dict(), peer)
    check_config(peer, opened.config, checkpoint)
    again = ct.load(directory / "ours")
    assert again.config == checkpoint.config
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    check_gradients(peer, model, checkpoint, directory)


def assert_same_state_dict(theirs: dict[str, Tensor], original: dict[str, Tensor], peer: PeerModel) -> None:
    assert theirs.keys() == original.keys()
    for name, tensor in original.items():
        assert name in peer.unused_parameters or torch.equal(theirs[name], tensor), f"after export, {name} differs"


def check_config(peer: PeerModel, written: Any, checkpoint: Checkpoint) -> None:
    """What transformers reads from our config.json is what it wrote itself, in every field the family knows."""
    family = families()[str(checkpoint.family)]
    keys = {key for entry in family.fields for key in entry.keys}
    a, b = written.to_dict(), peer.config.to_dict()
    for key in sorted(keys & b.keys()):
        if b[key] is not None:  # null means "work it out", and we write what was worked out
            assert config_values_equal(a.get(key), b[key]), (
                f"config after export: {key} is {a.get(key)!r}, was {b[key]!r}"
            )
    kept = families()[str(checkpoint.family)].config_from_hf(checkpoint.hf_config)[0]
    assert ct.config(checkpoint.hf_config).form == kept.form


def check_legacy_config(theirs: dict[str, Any], preset: str | None = None) -> Any:
    """A config.json as it was published means to us what it means to transformers, and is the preset."""
    family = families()[theirs["model_type"]]
    config = family.config_from_hf(theirs)[0]
    current = transformers.CONFIG_MAPPING[theirs["model_type"]].from_dict(dict(theirs))
    assert not diff_configs(config, family.config_from_hf(json.loads(current.to_json_string(use_diff=False)))[0])
    assert preset is None or not diff_configs(config, ct.config(preset))
    return config


def config_values_equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        computed = {"attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "factor"}
        shared = (a.keys() & b.keys()) | ((a.keys() ^ b.keys()) - computed - {"type", "partial_rotary_factor"})
        return all(
            config_values_equal(a.get(key), b.get(key)) for key in shared - {"dtype"}
        )  # a part's, set by loading
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(config_values_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def check_gradients(peer: PeerModel, model: Any, checkpoint: Checkpoint, directory: Path) -> None:
    """Our gradients, written as if they were weights and opened by the peer, are the peer's gradients."""
    shadow = copy.deepcopy(checkpoint.model)
    for (_, p), (_, source) in zip(shadow.named_parameters(), checkpoint.model.named_parameters(), strict=True):
        p.data = torch.zeros_like(p) if source.grad is None else source.grad.clone()
    ct.save(Checkpoint(shadow, shadow.config), directory / "gradients", family=checkpoint.family)
    opened = dict(peer.auto_class.from_pretrained(directory / "gradients").named_parameters())
    named = {name: p for name, p in model.named_parameters() if p.grad is not None and p.requires_grad}
    scale = max(p.grad.norm().item() for p in named.values())
    for name, p in named.items():
        mine, other = opened[name].detach().clone(), p.grad.clone()
        pad = getattr(peer.config, "pad_token_id", None)
        if pad is not None and len(other) == get_vocab_size(peer.config) and other.ndim == 2:
            mine[pad] = other[pad] = 0  # the peer keeps the padding token's row still
        if "position" in name and other.ndim == 2:
            mine, other = mine[2:], other[2:]  # and so those of padding positions
        beside = named.get(f"{name.removesuffix('bias')}weight")
        if name.endswith(".bias") and beside is not None and other.norm() < 1e-5 * beside.grad.norm():
            # Zero but for rounding: without RoPE, a key's bias moves all scores of a query alike. Ours must be so too.
            assert mine.norm() <= 1e-4 * beside.grad.norm(), f"gradient of {name}: {mine.norm():.2e}, not 0"
            continue
        worst = (mine - other).norm().item() / max(other.norm().item(), 1e-3 * scale)
        assert worst <= 1e-4, f"gradient of {name}: {worst:.2e}"


def check_extra_tensors(
    model: Any, directory: Path, beside: dict[str, Tensor], auto: Any = None, spell: Any = lambda name: name
) -> Checkpoint:
    """A file with further tensors beside the model, or with other names, means to us what it means to transformers."""
    randomize_weights(model.float().eval(), 0)
    model.save_pretrained(directory)
    stored = {spell(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(stored | beside, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint = ct.load(directory)
    assert checkpoint.load_report is not None
    assert set(checkpoint.load_report.ignored_weights) >= beside.keys()
    opened = (auto or transformers.AutoModelForCausalLM).from_pretrained(directory).eval()
    tokens = torch.randint(5, get_vocab_size(model.config), (2, 9), generator=torch.Generator().manual_seed(0))
    both = checkpoint.config.form == "encoder-decoder"
    with torch.no_grad():
        theirs = opened(input_ids=tokens, **({"decoder_input_ids": tokens} if both else {})).logits
        assert_close(checkpoint.model(*([tokens] * (2 if both else 1))), theirs, 0.0, "logits")
    return checkpoint
