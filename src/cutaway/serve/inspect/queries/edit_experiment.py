"""Query: an edit as an experiment: continuations before and after, and the loss on texts sampled from the model."""

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model import DecoderOnly
from cutaway.serve.inspect.interval_conclusions import conclude_edit_difference
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, interval_bounds

NUM_TEXTS, TEXT_LEN, NUM_NEW_TOKENS = 16, 48, 20
"""Sampled texts and their tokens, and the tokens of a continuation."""
SAMPLES: WeakKeyDictionary[Inspector, Tensor] = WeakKeyDictionary()
"""Inspector → texts sampled from its unedited model, (NUM_TEXTS, TEXT_LEN)."""


class EditExperiment(InputQuery):
    """Greedy continuation of the text, and loss on texts that the unedited model sampled, before and after the edits.

    The loss has a 95 % confidence interval over the texts; that of the difference is paired.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        inspector.validate_input(self.input)
        if not isinstance(inspector.model, DecoderOnly) or inspector.head is None:
            raise InputError("continuations and the loss on sampled texts need a decoder with an LM head")
        before = self.input.without_edits
        job.report_progress(0, 4, "sampling texts")
        texts = sample_texts(inspector)
        job.report_progress(1, 4, "loss on the texts")
        losses = [self._losses(inspector, model_input, texts) for model_input in (before, self.input)]
        job.report_progress(2, 4, "continuations")
        continuations = []
        for model_input in (before, self.input):
            continuations.append(self._continuation(inspector, model_input, job))
        difference = interval_bounds([after - first for first, after in zip(*losses, strict=True)])
        data = {
            "continuations": continuations,
            "loss_before": interval_bounds(losses[0]),
            "loss_after": interval_bounds(losses[1]),
            "difference": difference,
            **conclude_edit_difference(difference)._asdict(),
            "num_texts": NUM_TEXTS,
            "example": "".join(inspector.tokenizer.decode_token(token) for token in texts[0].tolist()),
        }
        return QueryResult(data)

    def _losses(self, inspector: Inspector, model_input: ModelInput, texts: Tensor) -> list[float]:
        """Mean loss of each text, in nats per token."""
        with inspector.edited_model(model_input):
            logits = inspector.model(texts)[:, :-1].float()
        losses: list[float] = F.cross_entropy(logits.mT, texts[:, 1:], reduction="none").mean(1).tolist()
        return losses

    def _continuation(self, inspector: Inspector, model_input: ModelInput, job: QueryJob) -> list[str]:
        """Tokens of the greedy continuation. Each step is a full forward pass, because edits may change the mask."""
        tokens, _ = inspector.to_tensors(model_input)
        new: list[str] = []
        with inspector.edited_model(model_input):
            while len(new) < NUM_NEW_TOKENS and tokens.shape[1] < (inspector.config.context or tokens.shape[1] + 1):
                job.check_cancelled()
                token = inspector.model(tokens)[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat((tokens, token), 1)
                new.append(inspector.tokenizer.decode_token(int(token)))
        return new


def sample_texts(inspector: Inspector) -> Tensor:
    """Texts sampled from the unedited model at temperature 1, after the first token of the default text of the page."""
    if inspector not in SAMPLES:
        start = inspector.tokenizer.encode(inspector.tokenizer.default_text)[0]
        device, generator = inspector.model.device, torch.Generator().manual_seed(0)
        tokens = torch.full((NUM_TEXTS, 1), start, device=device)
        length = min(TEXT_LEN, inspector.config.context or TEXT_LEN)
        with inspector.edited_model(ModelInput(tokens=(start,))):
            while tokens.shape[1] < length:
                probabilities = inspector.model(tokens)[:, -1].float().softmax(-1).cpu()
                tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator).to(device)), 1)
        SAMPLES[inspector] = tokens
    return SAMPLES[inspector]
