"""Two texts that are compared: alignment of their tokens, the answers of the model, and the logit difference."""

from dataclasses import dataclass

from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.analysis.inputs import AnalysisInputs
from cutaway.lens.analysis.token_alignment import align_tokens
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import Inspector, check_position
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.activation import final_norm_site
from cutaway.serve.inspect.queries.base import InputQuery, TokenIndex

NUM_TOP_TOKENS = 5


@dataclass(frozen=True)
class TextPair:
    """A clean and a changed input, with the selected position in each, and the pairs of aligned positions."""

    clean: ModelInput
    changed: ModelInput
    position: int
    changed_position: int
    token_pairs: list[tuple[int, int]]
    source_pairs: list[tuple[int, int]]

    def pairs(self, *, is_source: bool) -> list[tuple[int, int]]:
        return self.source_pairs if is_source else self.token_pairs

    def is_equal(self, pair: tuple[int, int], *, is_source: bool) -> bool:
        """Whether both texts have the same token at a pair of positions."""
        texts = (self.clean.source, self.changed.source) if is_source else (self.clean.tokens, self.changed.tokens)
        return (texts[0] or ())[pair[0]] == (texts[1] or ())[pair[1]]


@dataclass(frozen=True)
class Answers:
    """Logits of both runs at the selected position, (V,), and the most likely token of each run."""

    clean_logits: Tensor
    changed_logits: Tensor
    clean_token: int
    changed_token: int

    def logit_difference(self, logits: Tensor) -> Tensor:
        """Logit of the clean answer minus that of the changed answer, (…, V) → (…)."""
        return logits[..., self.clean_token] - logits[..., self.changed_token]


def build_text_pair(clean: ModelInput, changed: ModelInput, position: int) -> TextPair:
    """Align the tokens of two inputs. Raise if the token at `position` has no counterpart in the changed text."""
    check_position(position, clean.tokens)
    if clean.edits or changed.edits:
        raise InputError("texts are compared on the unedited model; remove the edits")
    token_pairs = align_tokens(clean.tokens, changed.tokens)
    source_pairs = align_tokens(clean.source or (), changed.source or ())
    changed_position = dict(token_pairs).get(position)
    if changed_position is None and position == len(clean.tokens) - 1:
        changed_position = len(changed.tokens) - 1
    if changed_position is None:
        problem = f"token {position} of the text has no counterpart in the changed text"
        raise InputError(f"{problem}; select a token that both texts have, such as the last one")
    return TextPair(clean, changed, position, changed_position, token_pairs, source_pairs)


class ComparisonQuery(InputQuery):
    """Query about two inputs. `input` is the clean text, and `position` the selected token in it."""

    changed: ModelInput
    position: TokenIndex

    def text_pair(self) -> TextPair:
        return build_text_pair(self.input, self.changed, self.position)


def find_answers(inspector: Inspector, pair: TextPair, job: QueryJob) -> Answers:
    """Run both inputs, and return their logits at the selected position."""
    name = final_norm_site(inspector)
    clean = inspector.logits(inspector.get_activations_at(pair.clean, [name], job)[name][pair.position])
    changed = inspector.logits(inspector.get_activations_at(pair.changed, [name], job)[name][pair.changed_position])
    return Answers(clean, changed, int(clean.argmax()), int(changed.argmax()))


def analysis_inputs(inspector: Inspector, model_input: ModelInput) -> AnalysisInputs:
    tokens, source = inspector.to_tensors(model_input)
    return AnalysisInputs(inspector.model, inspector.tokenizer.tokenizer, tokens, source)


def both_activations(
    inspector: Inspector, pair: TextPair, site_names: list[str], job: QueryJob
) -> tuple[ActivationCache, ActivationCache]:
    """Activations of the clean and of the changed run, including those at `site_names`."""
    return (
        inspector.get_activations_at(pair.clean, site_names, job),
        inspector.get_activations_at(pair.changed, site_names, job),
    )


def describe_token(inspector: Inspector, token: int) -> dict[str, object]:
    return {"token": token, "text": inspector.tokenizer.decode_token(token)}


def describe_top_tokens(inspector: Inspector, logits: Tensor) -> list[dict[str, object]]:
    top = logits.softmax(-1).topk(min(NUM_TOP_TOKENS, len(logits)))
    return [
        describe_token(inspector, token) | {"probability": probability}
        for token, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
