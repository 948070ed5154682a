"""Python snippet that prints the activation shown on the web page."""

import json
from pprint import pformat

from cutaway.lens.equations import position_module
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.model.rope import Rope
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput

MAX_LINE_WIDTH = 100
NUM_TOP_TOKENS = 20
"""Number of largest logits that are printed."""


def build_snippet(inspector: Inspector, model_input: ModelInput, site_name: str, position: int | str) -> str:
    """Return Python code that prints the activation of the token at `position`, a number or an expression, at a site.

    Return "" if no short expression computes the activation.
    """
    lines = model_lines(inspector)
    lines.append(f"tokens = torch.tensor([{list(model_input.tokens)}])")
    if model_input.source is not None:
        lines.append(f"source = torch.tensor([{list(model_input.source)}])")
    if site_name.endswith((".position", "embed.token")):
        expression = "" if model_input.edits else _direct_expression(inspector, site_name, position)
        return "\n".join([*lines, f"values = {expression}", "print(values)", ""]) if expression else ""
    site, index, operation = _trace_expression(site_name, position)
    edit_context = ""
    if model_input.edits:
        formatted_edits = pformat(json.loads(json.dumps(model_input.edits)), width=MAX_LINE_WIDTH, sort_dicts=False)
        lines.append(f"edits = {formatted_edits}")
        edit_context = "ct.edit(model, edits), "
    lines += [f"with {edit_context}torch.no_grad(), ct.trace(model, {site!r}) as t:", f"    {_model_call(inspector)}"]
    top_k = f".topk({min(NUM_TOP_TOKENS, inspector.model.config.vocab_size)})" if site == "logits" else ""
    return "\n".join([*lines, f"values = t[{site!r}]{index}{operation}", f"print(values{top_k})", ""])


def model_lines(inspector: Inspector) -> list[str]:
    """Return the lines of Python code that build or load the model."""
    if inspector.tokenizer.is_untrained:
        model = f"ct.build({inspector.name!r}, seed=0)"
    else:
        adapters = "" if inspector.adapter_source is None else f", adapters={inspector.adapter_source!r}"
        model = f"ct.load({inspector.name!r}{adapters}, dtype={inspector.model.dtype}).model"
    return ["import torch", "import cutaway as ct", "", f"model = {model}"]


def _model_call(inspector: Inspector) -> str:
    if isinstance(inspector.model, EncoderDecoder):
        return "model(source, tokens)"
    if inspector.head is not None:
        return "model(tokens)"
    return "model.encode(tokens)" if isinstance(inspector.model, EncoderOnly) else "model.hidden_states(tokens)"


def _direct_expression(inspector: Inspector, site_name: str, position: int | str) -> str:
    """Return a Python expression for an embedding row or RoPE angles, which have no site, or "" if there is none."""
    stacks = inspector.model.stacks
    side = next(side for side in stacks if site_name.startswith(f"{side}.") or len(stacks) == 1)
    if site_name.endswith("embed.token"):
        variable = "source" if side == "encoder" and len(stacks) > 1 else "tokens"
        return f"model.{side}.embed.token({variable})[0, {position}]"
    if "embed" in site_name:
        return f"model.{side}.embed.position(torch.tensor([[{position}]]))[0, 0]"
    layer = inspector.sites[f"{site_name.removesuffix('position')}q"].layer
    assert layer is not None
    rope = position_module(stacks[side], layer)
    if not isinstance(rope, Rope) or rope.switch_length is not None:
        return ""
    angles = f"{position} * model.{side}.positions[{stacks[side].layer_position_keys[layer]!r}].frequency"
    return f"({angles} + torch.pi) % (2 * torch.pi) - torch.pi"


def _trace_expression(site_name: str, position: int | str) -> tuple[str, str, str]:
    """Return the site to trace, the index into its value, and the operation applied to the indexed value."""
    index = f"[0, {position}]"
    if site_name == "softmax":
        return "logits", index, ".float().softmax(-1)"
    if site_name.endswith((".scores", ".pattern")):
        return site_name, f"[0, :, {position}]", ""
    if site_name.endswith(".mask"):
        return f"{site_name.removesuffix('mask')}scores", f"[0, :, {position}]", " == -torch.inf"
    if site_name.endswith(".router"):
        return site_name, f"[{position}]", ""
    return site_name, index, ""
