"""How a model of transformers is saved, read by cutaway, and made with other settings."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.check.again import SMALL, Again
from cutaway.check.settings import WIDE, another, fits, healthy, times
from cutaway.check.target import Logits, Target
from cutaway.errors import CutawayError
from cutaway.families.fields import Only
from cutaway.families.load import load
from cutaway.families.registry import families
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer


def offer(found: Target, model: Any, seed: int) -> None:
    """Add to a target what concerns its state."""
    found.reloaded = lambda: reloaded(model, found, seed)
    if getattr(model.config, "model_type", None) in families():
        found.variants = lambda: variants(model, seed)


@contextmanager
def quiet() -> Iterator[None]:
    """Without its bars and notices, which are for other occasions."""
    logging = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def reloaded(model: Any, found: Target, seed: int) -> Again:
    """Saved by its own method and loaded by it, and by cutaway where its family is known."""
    kept = dict(model.config.__dict__)  # saving writes the dtype and the class into it
    with tempfile.TemporaryDirectory(prefix="cutaway-check-") as directory, quiet():
        try:
            model.save_pretrained(directory)
        finally:
            model.config.__dict__.clear()
            model.config.__dict__.update(kept)
        how = {"dtype": model.dtype, "attn_implementation": model.config._attn_implementation}
        if getattr(model.config, "_experts_implementation", None) is not None:
            how["experts_implementation"] = model.config._experts_implementation
        back, said = type(model).from_pretrained(directory, output_loading_info=True, **how)
        back.to(model.device)
        missing = [*map(str, said["missing_keys"]), *(str(key) for key in said.get("mismatched_keys", ()))]
        again = Again(back, sorted(missing), sorted(map(str, said["unexpected_keys"])))
        read_by_cutaway(again, model, found, Path(directory), seed)
        for each in back.parameters():  # the files they are mapped from go
            each.data = each.data.clone()
    return again


# ------------------------------------------------------------------------------------------- the second implementation


def read_by_cutaway(again: Again, model: Any, found: Target, directory: Path, seed: int) -> None:
    """Our own reading of what was saved, or why there is none."""
    kind = type(model)
    family = families().get(getattr(model.config, "model_type", ""))
    known = family is not None and kind.__name__ in (family.architecture, family.trunk)
    bias = getattr(getattr(model.config, "attn_config", None), "alibi_bias_max", 8)
    if bias != 8:
        again.why = f"needs against (transformers computes every MPT as if alibi_bias_max were 8, and it is {bias})"
        return
    if not known or not kind.__module__.startswith("transformers."):
        again.why = f"needs against (cutaway has no reading of a {kind.__name__} of its own)"
        return
    try:
        ours = load(directory, device=model.device, dtype=torch.float32).model
    except CutawayError as error:
        again.why = f"needs against (cutaway does not read this one: {error})"
        return
    for each in ours.parameters():
        each.data = each.data.clone()
    if isinstance(ours, EncoderDecoder):
        from cutaway.check.theirs import source_for

        source = source_for(model, model.config, seed)
        again.second = lambda tokens: ours(source.expand(len(tokens), -1), tokens)
    elif isinstance(ours, EncoderOnly):
        call = ours if ours.head is not None else ours.encode
        again.second = lambda tokens: call(tokens)
    else:
        again.second = lambda tokens: ours(tokens)
    if found.kind != "encoder-decoder":
        again.parts = lambda module, tokens, noise: parted(module, again.second, ours, tokens, noise)


def parted(theirs: Any, second: Any, ours: Transformer, tokens: Tensor, noise: float) -> str | None:
    """The first layer whose stream is another one."""
    (stack,) = ours.stacks.values()
    names = {id(block): f"layer {n}" for n, block in enumerate(stack.blocks[:-1])}
    names = {id(stack.embed): "the embedding"} | names | {id(stack.final_norm): "the last layer"}
    seen: dict[str, Tensor] = {}
    hooks = [
        part.register_forward_hook(lambda part, _given, out: seen.setdefault(names[id(part)], out.detach()))
        for part in (stack.embed, *stack.blocks[:-1], stack.final_norm)
    ]
    try:
        second(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    states = theirs(input_ids=tokens, output_hidden_states=True).hidden_states
    for (name, mine), other in zip(seen.items(), states or (), strict=False):
        far = 100 * (torch.finfo(other.dtype).eps + noise) * float(other.abs().max())
        if mine.shape == other.shape and float((mine - other).abs().max()) > far:
            return name
    return None


# ------------------------------------------------------------------------------------------------- other settings


def variants(model: Any, seed: int) -> Mapping[str, Callable[[], Logits]]:
    """For each setting that the family's table counts as used, and that must be seen: the model with another value."""
    small = sum(each.numel() for each in model.parameters()) <= SMALL
    state = healthy(model, seed) if small else {name: each.detach() for name, each in model.state_dict().items()}
    fields = families()[model.config.model_type].fields
    used = {key for field in fields if not isinstance(field, Only) for key in field.keys}
    made: dict[str, Callable[[], Logits]] = {"": partial(with_settings, model, {}, state, seed)}
    for key in sorted(used):
        for path, config, value in settings_in(model.config, key):
            other = instead(config, path.rpartition(".")[2], value)
            if other is not None:
                made[path] = partial(with_settings, model, {path: other}, state, seed)
    return made


def settings_in(config: Any, key: str) -> list[tuple[str, Any, Any]]:
    """A setting's path, the configuration that holds it, and its value; of one that holds others, theirs."""
    value: Any = getattr(config, key, None)
    if hasattr(value, "to_dict"):
        return [(f"{key}.{name}", value, each) for name, each in value.to_dict().items() if each is not None]
    return [] if value is None else [(key, config, value)]  # what is not asked for need not be there


def with_settings(model: Any, settings: dict[str, Any], state: Mapping[str, Tensor], seed: int) -> Logits:
    """The logits of a model with these settings and weights."""
    from cutaway.check import theirs

    config = deepcopy(model.config)
    for path, value in settings.items():
        holder, _, key = path.rpartition(".")
        setattr(getattr(config, holder) if holder else config, key, value)
    with quiet(), import_module("transformers.initialization").no_init_weights(), model.device:
        other = type(model)(config)
    fits(other, state)
    other.load_state_dict(state, assign=True)
    logits = theirs.target(other.eval(), seed).logits
    assert logits is not None
    return logits


def instead(config: Any, key: str, value: Any) -> Any:
    """Another value for a setting that must then be seen; none where it need not be."""
    alone = getattr(config, "sliding_window", None) == 1  # a token that sees only itself has no use for scores
    if alone and key in ("rope_parameters", "attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"):
        return None
    if key == "rope_parameters" and isinstance(value, dict):
        return None if getattr(config, "alibi", False) else other_angles(config, value)
    if key == "sliding_window":
        types = getattr(config, "layer_types", None)
        slides = "sliding_attention" in types if types else getattr(config, "use_sliding_window", True)
        return another(value, 2, 3) if slides and isinstance(value, int) else None
    table = {
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"): WIDE,
        ("hidden_act", "activation_function", "hidden_activation"): another(value, "tanh", "relu"),
        ("attn_logit_softcapping", "final_logit_softcapping"): another(value, 0.5, 1.0),
        ("logit_scale", "residual_multiplier", "attention_multiplier", "logits_scaling"): times(value, 3),
        ("routed_scaling_factor", "embedding_multiplier"): times(value, 3),
        ("query_pre_attn_scalar",): times(value, 9),
        ("scale_attn_weights", "use_parallel_residual", "scale_embedding"): not value,
        ("clip_qkv", "swiglu_limit"): another(value, 0.1, 0.2),
        ("swiglu_alpha", "softmax_scale"): times(value, 3),
        ("alibi_bias_max",): times(value, 4) if getattr(config, "alibi", False) else None,
    }
    return next((other for keys, other in table.items() if key in keys), None)


def other_angles(config: Any, value: dict[str, Any]) -> Any:
    """RoPE with another base, for all kinds of layers; none where so few dimensions turn that it need not be seen."""
    width = getattr(config, "head_dim", None) or getattr(config, "qk_rope_head_dim", None)
    width = width or config.hidden_size // getattr(config, "num_attention_heads", 1)
    other = deepcopy(value)
    for each in (other, *(inner for inner in other.values() if isinstance(inner, dict))):
        plain = each.get("rope_type", "default") == "default"
        if "rope_theta" in each and plain and width * each.get("partial_rotary_factor", 1.0) > 4:
            each["rope_theta"] = each["rope_theta"] * 0.01
    return other if other != value else None
