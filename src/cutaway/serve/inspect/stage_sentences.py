"""One sentence for each site of the trace screen: what it computes here, with numbers of this input."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.lens import attention_pattern
from cutaway.lens.analysis.inputs import upcast_float32
from cutaway.lens.equations import position_module, uses_rope
from cutaway.lens.labeled_tensor import show_whitespace
from cutaway.lens.sites import Site, resid_before_sublayer, site_suffix
from cutaway.lens.structural_edits import structural_targets
from cutaway.model.attention import LatentAttention
from cutaway.model.block import ParallelBlock
from cutaway.model.norms import LayerNorm, RMSNorm
from cutaway.model.positions import Alibi, Disentangled, SinusoidalPosition
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import Inspector

MIN_ACTIVE_UNIT = 0.1
"""Absolute value above which a hidden unit of an FFN is counted as active."""
NUM_TOP_TOKENS = 5


@dataclass(frozen=True)
class StageInputs:
    """What a sentence is computed from: the activations of the input, and one token's values at the site."""

    inspector: Inspector
    activations: ActivationCache
    site_name: str
    position: int
    values: Tensor
    """The values at the site, without the token axis; scores and mask have −∞ where masked."""

    @cached_property
    def site(self) -> Site:
        """The site, or for values without a site (mask, position) the site `q` of the same attention."""
        sites = self.inspector.sites
        return sites.get(self.site_name) or sites[f"{self.site_name.rpartition('.')[0]}.q"]

    @cached_property
    def block(self) -> Any:
        assert self.site.stack is not None
        assert self.site.layer is not None
        return self.site.stack.blocks[self.site.layer]

    @property
    def is_cross(self) -> bool:
        return ".cross." in self.site_name

    @property
    def query_ids(self) -> Sequence[int]:
        model_input = self.activations.model_input
        is_source = self.site_name.startswith("encoder.") and model_input.source is not None
        return (model_input.source or ()) if is_source else model_input.tokens

    @property
    def key_ids(self) -> Sequence[int]:
        model_input = self.activations.model_input
        return (model_input.source or ()) if self.is_cross else self.query_ids

    @property
    def has_structural_edit(self) -> bool:
        """Whether an edit skips or reorders blocks, or drops or moves positions, the mask or the final norm."""
        return any(name in structural_targets(self.inspector.model) for name in self.activations.model_input.edits)

    def quote(self, token_ids: Sequence[int], position: int) -> str:
        text = self.inspector.tokenizer.decode_token(token_ids[position])
        return f"‘{show_whitespace(text)}’ (token {position})"

    def read_norm(self, site_name: str) -> float | None:
        value = self.read(site_name)
        return None if value is None else float(value.norm())

    def read(self, site_name: str) -> Tensor | None:
        value = self.activations.values.get(site_name)
        return None if value is None else upcast_float32(value[0, self.position])


def describe_stage(inputs: StageInputs) -> str:
    """Return one sentence on what a site computes here, or an empty string."""
    name = inputs.site_name
    if inputs.has_structural_edit and not name.endswith((".scores", ".mask", ".pattern", ".z", ".hidden", ".router")):
        return f"A structural edit is active; the values have norm {_norm(inputs.values)}."
    if "embed" in name:
        return _describe_embedding(inputs)
    suffix = site_suffix(name)
    if inputs.site.layer is None:
        return _describe_norm(_stack(inputs).final_norm, inputs, _last_resid(inputs))
    if suffix in ("resid_pre", "resid_mid", "resid_post", "cross.resid_pre"):
        return _describe_addition(inputs)
    sublayer, _, value = suffix.partition(".")
    if value == "in":
        branch = getattr(inputs.block, sublayer)
        norm = inputs.block.norm if isinstance(inputs.block, ParallelBlock) else branch.norm_in
        norm = branch.norm_in if isinstance(norm, nn.Identity) else norm
        return _describe_norm(norm, inputs, inputs.read(resid_before_sublayer(inputs.site)))
    if value == "out":
        return _describe_output(inputs, sublayer)
    if sublayer == "ffn":
        return _describe_ffn(inputs, value)
    describe = {
        "q": _describe_vectors, "k": _describe_vectors, "v": _describe_vectors, "position": _describe_position,
        "scores": _describe_scores, "mask": _describe_mask, "pattern": _describe_pattern, "z": _describe_head_outputs,
    }  # fmt: skip
    return describe[value](inputs) if value in describe else ""


def describe_logits(values: Tensor, top_token_strs: Sequence[str], *, is_logits: bool) -> str:
    """Return one sentence on the logits or probabilities (V,) of the next token."""
    top = values.topk(min(NUM_TOP_TOKENS, len(values))).values
    first = f"‘{show_whitespace(top_token_strs[0])}’"
    if is_logits:
        second = f", then ‘{show_whitespace(top_token_strs[1])}’ with {_format(top[1])}" if len(top) > 1 else ""
        return f"One logit for each of {len(values):,} tokens: {first} has the largest, {_format(top[0])}{second}."
    entropy = float(torch.special.entr(values.double()).sum()) / torch.log(torch.tensor(2.0)).item()
    return (
        f"Softmax turns {len(values):,} logits into probabilities that sum to 1: {first} has {_percent(top[0])}, the "
        f"{len(top)} most likely tokens have {_percent(top.sum())} in total; entropy {entropy:.2f} bits."
    )


def _describe_embedding(inputs: StageInputs) -> str:
    prefix = inputs.site_name[: inputs.site_name.index("embed")]
    stack: Any = inputs.inspector.sites[f"{prefix}embed"].stack
    embed, suffix = stack.embed, inputs.site_name.rpartition(".")[2]
    token = inputs.quote(inputs.query_ids, inputs.position)
    if suffix == "token":
        scale = "" if embed.scale == 1.0 else f"; the embedding then multiplies it by {_format(embed.scale)}"
        row = inputs.query_ids[inputs.position]
        return f"Row {row} of the embedding matrix: the vector of {token}, norm {_norm(inputs.values)}{scale}."
    if suffix == "position":
        kind = "Sinusoidal" if isinstance(embed.position, SinusoidalPosition) else "Learned"
        return (
            f"{kind} position embedding of position {inputs.position}: it depends on the position only, not on the "
            f"token; norm {_norm(inputs.values)}."
        )
    terms = ["the token embedding"] + (["the position embedding"] if embed.position is not None else [])
    normed = "" if isinstance(embed.norm, nn.Identity) else ", normalized"
    positions = "" if embed.position is not None else "; this model adds no position embedding"
    start = f"{' plus '.join(terms)}{normed}, norm {_norm(inputs.values)}"
    return f"The residual stream of {token} starts as {start}{positions}."


def _describe_norm(norm: nn.Module, inputs: StageInputs, x: Tensor | None) -> str:
    """Return a sentence with the statistics of the norm's input `x`, or without them if `x` is not cached."""
    after = f"the norm of the vector changes from {_norm(x)} to {_norm(inputs.values)}" if x is not None else ""
    if isinstance(norm, RMSNorm):
        gain = upcast_float32(norm.weight.detach())
        gains = f"the learned gains ({_format_range(1 + gain if norm.unit_offset else gain)})"
        rms = "its RMS" if x is None else f"its RMS {_format(x.square().mean().add(norm.eps).sqrt())}"
        return _join(f"Divides the residual stream by {rms} and multiplies by {gains}", after)
    if isinstance(norm, LayerNorm):
        mean = "its mean" if x is None else f"its mean {_format(x.mean())}"
        std = "its standard deviation"
        std += "" if x is None else f" {_format(x.var(correction=0).add(norm.eps).sqrt())}"
        gains = "" if norm.weight is None else f", multiplies by the learned gains ({_format_range(norm.weight)})"
        bias = "" if norm.bias is None else " and adds the learned bias"
        return _join(f"Subtracts {mean}, divides by {std}{gains}{bias}", after)
    reader = "head" if inputs.site_name.endswith("final_norm") else "sublayer"
    return f"No norm here: the {reader} reads the residual stream itself, norm {_norm(inputs.values)}."


def _describe_addition(inputs: StageInputs) -> str:
    """Return the norms of the residual stream before and after the last addition."""
    name, block_name = inputs.site_name, inputs.site_name[: -len(site_suffix(inputs.site_name))]
    suffix, block = site_suffix(name), inputs.block
    if suffix == "resid_pre":
        return f"Residual stream that this block reads, norm {_norm(inputs.values)}."
    has_cross = f"{block_name}cross.resid_pre" in inputs.inspector.sites
    sublayers: tuple[str, ...] = ("attn", "ffn")
    before, norm = f"{block_name}resid_pre", None
    if not isinstance(block, ParallelBlock):
        before, sublayer = {
            "cross.resid_pre": (f"{block_name}resid_pre", "attn"),
            "resid_mid": (f"{block_name}{'cross.' if has_cross else ''}resid_pre", "cross" if has_cross else "attn"),
            "resid_post": (f"{block_name}resid_mid", "ffn"),
        }[suffix]
        sublayers, norm = (sublayer,), getattr(block, f"norm_after_{sublayer}")
    old, labels = inputs.read(before), {"attn": "attention", "cross": "cross-attention", "ffn": "FFN"}
    norms = {labels[sublayer]: inputs.read_norm(f"{block_name}{sublayer}.out") for sublayer in sublayers}
    if old is None or None in norms.values():
        return f"Residual stream after this sublayer, norm {_norm(inputs.values)}."
    terms = [f"the {label} output (norm {_format(value or 0.0)})" for label, value in norms.items()]
    cosine = float(torch.cosine_similarity(old, inputs.values.to(old.device), dim=0))
    normed = "" if norm is None or isinstance(norm, nn.Identity) else " and normalizes the sum"
    stream = "the normed residual stream" if getattr(block, "norm_skip", False) else "the residual stream"
    return (
        f"Adds {' and '.join(terms)} to {stream} (norm {_norm(old)}){normed}: the result has norm "
        f"{_norm(inputs.values)} and cosine similarity {cosine:.3f} with the residual stream before."
    )


def _describe_output(inputs: StageInputs, sublayer: str) -> str:
    matrix = "Wₒ combines the outputs of all heads" if sublayer != "ffn" else "W₂ combines the hidden units"
    if sublayer == "ffn" and hasattr(inputs.block.ffn.f, "router"):
        shared = getattr(inputs.block.ffn.f, "shared", None) is not None
        matrix = f"The outputs of the selected experts{' and the shared expert' if shared else ''} are summed"
    resid = inputs.read_norm(resid_before_sublayer(inputs.site))
    share = ""
    if resid:
        ratio = _percent(float(inputs.values.norm()) / resid)
        share = f", {ratio} of the norm {_format(resid)} of the residual stream before"
    return f"{matrix} into one vector, which is added to the residual stream: norm {_norm(inputs.values)}{share}."


def _describe_ffn(inputs: StageInputs, value: str) -> str:
    values = inputs.values
    if value == "router":
        router = inputs.block.ffn.f.router
        of_all = f" of {inputs.block.ffn.f.num_experts}"
        weights = ", ".join(_format(weight) for weight in values.sort(descending=True).values.tolist())
        return f"The router selects {router.top_k}{of_all} experts for this token; their weights are {weights}."
    size = values.abs()
    num_active, top = int((size > MIN_ACTIVE_UNIT).sum()), int(size.flatten().argmax())
    return (
        f"{num_active} of {values.numel()} hidden units are above {MIN_ACTIVE_UNIT} in absolute value; unit {top} has "
        f"the largest, {_format(values.flatten()[top])}."
    )


def _describe_vectors(inputs: StageInputs) -> str:
    kind = inputs.site_name.rpartition(".")[2]
    heads, width = inputs.values.shape
    sizes = dict(inputs.site.axis_sizes)
    stack = _stack(inputs)
    assert inputs.site.layer is not None
    norms = inputs.values.norm(dim=-1)
    label = {"q": "query", "k": "key", "v": "value"}[kind]
    shared = sizes["H"] // sizes["G"] if kind != "q" and sizes.get("G") else 1
    group = f", each shared by {shared} query heads" if shared > 1 else ""
    head = "KV head" if shared > 1 else "head"
    rope = not inputs.is_cross and kind != "v" and uses_rope(stack, inputs.site.layer)
    is_latent = isinstance(inputs.block.attn.f, LatentAttention)
    part = f"the last {inputs.block.attn.f.d_rope} values of each are" if is_latent and rope else "already"
    rotated = f", {part} rotated by RoPE to position {inputs.position}" if rope else ""
    source = " (read from the encoder output)" if inputs.is_cross and kind != "q" else ""
    top = int(norms.argmax())
    vectors = f"{_count(heads, f'{label} vector')} of {width} values{source}, one for each {head}{group}{rotated}"
    return f"{vectors}; {head} {top} has the largest norm, {_format(norms[top])}."


def _describe_position(inputs: StageInputs) -> str:
    stack = _stack(inputs)
    assert inputs.site.layer is not None
    module = position_module(stack, inputs.site.layer)
    if uses_rope(stack, inputs.site.layer):
        angles = inputs.values
        return (
            f"RoPE rotates {len(angles)} pairs of each query and key by position {inputs.position} × the frequency of "
            f"the pair (shown from −π to π): pair 0 by {_format(angles[0])} rad, pair {len(angles) - 1} by "
            f"{_format(angles[-1])} rad."
        )
    low, high = (_format(value) for value in torch.aminmax(inputs.values))
    if isinstance(module, Alibi):
        return f"ALiBi adds −slope × distance to each score, with one slope per head: here {low} to {high}."
    if isinstance(module, Disentangled):
        return f"Scores of contents and relative positions are added to each score: here {low} to {high}."
    return f"A learned bias by distance is added to each score, one per head and bucket: here {low} to {high}."


def _describe_scores(inputs: StageInputs) -> str:
    head, key = _argmax(inputs.values)
    visible = (inputs.values != -torch.inf).any(0)
    query = inputs.quote(inputs.query_ids, inputs.position)
    kernel = inputs.activations.attention_calls[inputs.site_name.rpartition(".")[0]][0]
    cap = "" if kernel.softcap is None else f", softcapped at ±{_format(kernel.softcap)}"
    hidden = len(visible) - int(visible.sum())
    masked = f"; {_count(hidden, 'key')} masked (−∞)" if hidden else ""
    return (
        f"Scaled dot products of the query of {query} with {_count(int(visible.sum()), 'visible key')}{cap}: the "
        f"largest, {_format(inputs.values[head, key])}, is in head {head} with {inputs.quote(inputs.key_ids, key)}"
        f"{masked}."
    )


def _describe_mask(inputs: StageInputs) -> str:
    visible = (inputs.values != -torch.inf).any(0)
    num_keys, num_visible, position = len(visible), int(visible.sum()), inputs.position
    token, hidden = inputs.quote(inputs.query_ids, position), num_keys - num_visible
    assert inputs.site.layer is not None
    stack = _stack(inputs)
    window = None if inputs.is_cross else stack.windows[inputs.site.layer]
    if inputs.is_cross:
        return f"Cross-attention: {token} sees all {_count(num_keys, 'source token')}; no key is masked."
    if not hidden:
        if not stack.causal:
            return f"Bidirectional attention: every token sees all {_count(num_keys, 'token')}; no key is masked."
        if num_keys == 1:
            return f"{token} is the only token and sees itself; no key is masked."
        who = "The last token" if position == num_keys - 1 else f"An edit drops the causal mask: {token}"
        return f"{who} sees all {_count(num_keys, 'token')}; no key is masked."
    first, last = int(visible.nonzero()[0]), int(visible.nonzero()[-1])
    later, earlier = num_keys - 1 - last, first
    parts = [_count(number, f"{kind} token") for number, kind in ((earlier, "earlier"), (later, "later")) if number]
    rules = (["causal mask"] if stack.causal else []) + ([f"sliding window of {window} tokens"] if window else [])
    seen = f"token {first}" if first == last else f"tokens {first} to {last}"
    masked = f"{' and '.join(parts)} masked ({', '.join(rules)})"
    return f"{token} sees {_count(num_visible, 'token')} ({seen}) of {num_keys}; {masked}."


def _describe_pattern(inputs: StageInputs) -> str:
    head, key = _argmax(inputs.values)
    sums = inputs.values.sum(-1)
    args = inputs.activations.attention_calls[inputs.site_name.rpartition(".")[0]][1]
    has_sink = attention_pattern.unpack_kernel_args(args)[4] is not None
    total = (
        f"that sum to 1 with the sink, which has {_percent((1 - sums).clamp(min=0).mean())} on average over the heads"
        if has_sink
        else "that sum to 1 in each head"
    )
    return (
        f"Softmax turns the scores into weights {total}: the largest, {_percent(inputs.values[head, key])}, is in head "
        f"{head} on {inputs.quote(inputs.key_ids, key)}."
    )


def _describe_head_outputs(inputs: StageInputs) -> str:
    norms = inputs.values.norm(dim=-1)
    high, low = int(norms.argmax()), int(norms.argmin())
    spread = "" if high == low else f", head {low} the smallest, {_format(norms[low])}"
    largest = f"head {high} has the largest norm, {_format(norms[high])}"
    return f"In each head, the weighted sum of the value vectors: {largest}{spread}."


def _argmax(values: Tensor) -> tuple[int, int]:
    index = int(values.argmax())
    return index // values.shape[-1], index % values.shape[-1]


def _stack(inputs: StageInputs) -> Any:
    assert inputs.site.stack is not None
    return inputs.site.stack


def _last_resid(inputs: StageInputs) -> Tensor | None:
    prefix = inputs.site_name.removesuffix("final_norm")
    return inputs.read(f"{prefix}blocks.{len(_stack(inputs).blocks) - 1}.resid_post")


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part) + "."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _norm(value: Tensor) -> str:
    return _format(value.norm())


def _format_range(values: Tensor) -> str:
    low, high = torch.aminmax(values.detach())
    return f"{_format(low)} to {_format(high)}"


def _percent(fraction: Tensor | float) -> str:
    fraction = float(fraction)
    return "<0.1 %" if 0 < fraction < 0.001 else f"{100 * fraction:.1f} %"


def _format(value: Tensor | float) -> str:
    """Format a number with about three significant digits, like the web page."""
    value = float(value)
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e6):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa}e{int(exponent):+d}"
    else:
        text = f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"
    return text.replace("-", "−")
