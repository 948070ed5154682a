"""Query: the metric of activation patching, a logit difference or a log-probability, and its value in both runs."""

from dataclasses import dataclass

from torch import Tensor

from cutaway.errors import InputError
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenId
from cutaway.serve.inspect.queries.base import QueryJob, QueryResult
from cutaway.serve.inspect.queries.text_pair import (
    NUM_TOP_TOKENS,
    Answers,
    ComparisonQuery,
    TextPair,
    describe_token,
    find_answers,
)

MAX_INPUT_TOKENS = 256
"""Longer texts would need too many forward passes."""
MIN_CHANGE = 0.01
"""Smaller changes of the metric, in nats or logits, are not divided by: the shares would be mostly rounding errors."""


@dataclass(frozen=True)
class Metric:
    """Log-probability of the answer token, or its logit minus that of the incorrect token; its value in both runs."""

    answer_token: int
    incorrect_token: int | None
    clean: float
    changed: float

    def measure(self, logits: Tensor) -> Tensor:
        """Value of the metric, (…, V) → (…)."""
        return measure_tokens(logits, self.answer_token, self.incorrect_token)

    @property
    def change(self) -> float:
        return abs(self.clean - self.changed)

    def restored_share(self, logits: Tensor, *, reverse: bool) -> Tensor:
        """Share of the metric's change that patches restore, (…, V) → (…): 0 in the receiver run, 1 in the donor run.

        The receiver is the run on the changed text, or with `reverse` the run on the clean text.
        """
        start, end = (self.clean, self.changed) if reverse else (self.changed, self.clean)
        return (self.measure(logits) - start) / (end - start)


def measure_tokens(logits: Tensor, answer_token: int, incorrect_token: int | None) -> Tensor:
    """Log-probability of the answer token, or its logit minus that of the incorrect token, (…, V) → (…)."""
    if incorrect_token is None:
        return logits.log_softmax(-1)[..., answer_token]
    return logits[..., answer_token] - logits[..., incorrect_token]


def build_metric(answers: Answers, answer_token: int, incorrect_token: int | None) -> Metric:
    clean, changed = (
        float(measure_tokens(logits, answer_token, incorrect_token))
        for logits in (answers.clean_logits, answers.changed_logits)
    )
    return Metric(answer_token, incorrect_token, clean, changed)


def choose_default_metric(answers: Answers) -> Metric:
    """Logit difference between the answers, or if they are equal the log-probability of one token.

    This is the token whose probability changes most among the top tokens of both runs.
    """
    if answers.clean_token != answers.changed_token:
        metric = build_metric(answers, answers.clean_token, answers.changed_token)
        if metric.change >= MIN_CHANGE:
            return metric
    runs = (answers.clean_logits, answers.changed_logits)
    top_tokens = [token for logits in runs for token in logits.topk(min(NUM_TOP_TOKENS, len(logits))).indices.tolist()]
    clean, changed = (logits.softmax(-1) for logits in runs)
    metrics = [build_metric(answers, token, None) for token in dict.fromkeys(top_tokens)]
    # A probability near 1 can change most although its logarithm hardly changes.
    measurable = [metric for metric in metrics if metric.change >= MIN_CHANGE] or metrics
    return max(measurable, key=lambda metric: abs(float(clean[metric.answer_token] - changed[metric.answer_token])))


class MetricQuery(ComparisonQuery):
    """Query about two inputs with a metric. Without `answer_token`, the metric is chosen from the predictions."""

    answer_token: TokenId | None = None
    incorrect_token: TokenId | None = None

    def choose_metric(self, inspector: Inspector, pair: TextPair, job: QueryJob) -> Metric:
        if inspector.head is None:
            raise InputError("this model has no LM head, so it has no answer to restore; compare its activations")
        if self.answer_token is None and self.incorrect_token is not None:
            raise InputError("incorrect_token is set, but answer_token is not; pass both")
        for name, token in (("answer_token", self.answer_token), ("incorrect_token", self.incorrect_token)):
            if token is not None and token >= inspector.config.vocab_size:
                raise InputError(f"{name} is {token}; the vocabulary has {inspector.config.vocab_size} tokens")
        answers = find_answers(inspector, pair, job)
        if self.answer_token is None:
            return choose_default_metric(answers)
        return build_metric(answers, self.answer_token, self.incorrect_token)


def find_patching_problem(pair: TextPair, metric: Metric) -> str | None:
    """Why patching does not apply to these texts and this metric; None if it applies."""
    longest = max(len(ids or ()) for text in (pair.clean, pair.changed) for ids in (text.tokens, text.source))
    if longest > MAX_INPUT_TOKENS:
        return (
            f"the text has {longest} tokens, and patches are measured for up to {MAX_INPUT_TOKENS}; use a shorter text"
        )
    if pair.clean == pair.changed:
        return "both texts are equal, so there is no difference to restore; change a word of the changed text"
    if not pair.token_pairs and not pair.source_pairs:
        problem = "the texts share no aligned tokens, so no activation can be copied"
        return f"{problem}; use the same text with one word changed"
    if metric.answer_token == metric.incorrect_token:
        return "both tokens of the logit difference are the same, so it is always 0; choose two tokens"
    if metric.change < MIN_CHANGE:
        problem = f"the metric changes by only {metric.change:.4f} between the two texts"
        return f"{problem}, too little to measure shares of it; choose another token, or change another word"
    return None


class PatchingMetric(MetricQuery):
    """Tokens of the metric, its value in both runs, and why it cannot be restored, or null if it can."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        pair = self.text_pair()
        metric = self.choose_metric(inspector, pair, job)
        incorrect = metric.incorrect_token
        data = {
            "answer": describe_token(inspector, metric.answer_token),
            "incorrect": None if incorrect is None else describe_token(inspector, incorrect),
            "clean": metric.clean,
            "changed": metric.changed,
            "problem": find_patching_problem(pair, metric),
        }
        return QueryResult(data)
