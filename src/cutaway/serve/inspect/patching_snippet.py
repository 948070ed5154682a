"""Python snippet that reproduces activation patches of the web page."""

from collections.abc import Sequence

from cutaway.lens.analysis.patched_logits import Patch
from cutaway.model import EncoderDecoder
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.snippet import model_lines


def build_patching_snippet(
    inspector: Inspector,
    donor: ModelInput,
    receiver: ModelInput,
    patches: Sequence[Patch],
    position: int,
    answer_token: int,
    incorrect_token: int | None,
) -> str:
    """Return Python code that copies activations of the donor run and prints the metric of the receiver run.

    The metric is the log-probability of `answer_token` at `position`, or its logit minus that of `incorrect_token`.
    """
    lines = model_lines(inspector)
    for name, model_input in (("donor", donor), ("receiver", receiver)):
        inputs = f"torch.tensor([{list(model_input.tokens)}])"
        if isinstance(inspector.model, EncoderDecoder):
            inputs = f"torch.tensor([{list(model_input.source or ())}]), {inputs}"
            lines.append(f"{name} = {inputs}  # source, target")
        else:
            lines.append(f"{name} = ({inputs},)")
    lines.append("patches = [  # site, (donor position, receiver position) of each token, head (slice(None): all)")
    for patch in patches:
        head = "slice(None)" if patch.head is None else patch.head
        lines.append(f"    ({patch.site!r}, {list(patch.positions)}, {head}),")
    sites = list(dict.fromkeys(patch.site for patch in patches))
    answer = repr(inspector.tokenizer.decode_token(answer_token))
    if incorrect_token is None:
        metric = [f"# metric: log-probability of {answer}", f"print(logits.log_softmax(-1)[{answer_token}])"]
    else:
        incorrect = repr(inspector.tokenizer.decode_token(incorrect_token))
        metric = [
            f"# metric: logit difference, {answer} minus {incorrect}",
            f"print(logits[{answer_token}] - logits[{incorrect_token}])",
        ]
    edits = "{site: copy_from_donor(site) for site, _, _ in patches}"
    lines += [
        "]",
        "",
        f"with torch.no_grad(), ct.trace(model, {', '.join(map(repr, sites))}) as t:",
        "    model(*donor)",
        "",
        "",
        "def copy_from_donor(site):",
        "    def copy(value):",
        "        for name, positions, head in patches:",
        "            for source, target in positions if name == site else ():",
        "                value[0, target, head] = t[site][0, source, head]",
        "        return value",
        "",
        "    return copy",
        "",
        "",
        f"with torch.no_grad(), ct.edit(model, {edits}):",
        f"    logits = model(*receiver)[0, {position}]",
        *metric,
        "",
    ]
    return "\n".join(lines)
