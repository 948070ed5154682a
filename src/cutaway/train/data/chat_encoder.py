"""Encoder of the records of supervised fine-tuning: token ids, and a mask of the tokens that are targets."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.chat.assistant_mask import AssistantMaskEncoder, MaskedTokens
from cutaway.tokenizer.chat.shipped_templates import default_chat_template, load_chat_template
from cutaway.train.data.chat_dataset import PackedChatDataset, PaddedChatDataset
from cutaway.train.data.chat_formats import Conversation, PlainText, parse_record
from cutaway.train.data.chat_summary import ChatSummary, summarize_rows
from cutaway.train.data.datasets import Row
from cutaway.train.data.record_encoder import RecordEncoder
from cutaway.train.data.records import InvalidRecordError, Record, RecordDataset, RecordSplits
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.schema import SFTConfig


class SFTEncoder(RecordEncoder):
    """Encodes conversations, prompts with completions, and texts.

    A row has token ids, and for each token 1 if it is a target. Texts and completions are followed by EOS.
    """

    def __init__(
        self, objective: SFTConfig, max_len: int, tokenizer: Tokenizer, stop_token_ids: Sequence[int] = ()
    ) -> None:
        """`max_len`: maximum number of input tokens. `stop_token_ids`: tokens that end generation, besides EOS."""
        # The last token is only a target, so that a sequence has one more token than the model reads.
        self.objective, self.tokenizer, self.max_tokens = objective, tokenizer, max_len + 1
        self.encoder = AssistantMaskEncoder(tokenizer, stop_token_ids=stop_token_ids)
        self.summary = ChatSummary(truncation=objective.truncation, max_tokens=self.max_tokens)

    def encode(self, record: Record) -> Row:
        parsed = parse_record(record)
        masked = self._encode_text(parsed) if isinstance(parsed, PlainText) else self._encode_chat(parsed)
        masked = self._truncate(masked)
        if not any(masked.is_target[1:]):
            raise InvalidRecordError("no target tokens", "no token of the assistant is within data.seq_len tokens")
        return np.array(masked.ids, np.int64), np.array(masked.is_target, np.int64)

    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> RecordDataset[Any]:
        pad_id = self.tokenizer.pad_token_id or 0
        if not self.objective.packing:
            return PaddedChatDataset(rows, seed, pad_id=pad_id, shuffle=shuffle)
        return PackedChatDataset(rows, seed, max_tokens=self.max_tokens, pad_id=pad_id, shuffle=shuffle)

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Callable[[str], None]) -> Metrics:
        num_sequences = len(rows)
        if self.objective.packing:
            dataset = self.build_dataset(rows, 0, shuffle=False)
            num_sequences = dataset.num_sequences
        return summarize_rows(rows, splits, self.summary, self.tokenizer, num_sequences, log)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn in the chat template, at which generation should stop."""
        tokens = self.encoder.end_tokens if self.summary.num_conversations else []
        return frozenset(i for token in tokens if (i := self.tokenizer.token_to_id(token)) is not None)

    def _encode_chat(self, conversation: Conversation) -> MaskedTokens:
        self._ensure_template()
        self.encoder.turn_finder(with_tools=conversation.tools is not None)  # an invalid template ends the run
        try:
            masked = self.encoder.encode_chat(
                conversation.messages, tools=conversation.tools, train_on=conversation.train_on
            )
        except InputError as error:
            raise InvalidRecordError("the chat template cannot encode it", str(error)) from None
        self.summary.num_conversations += 1
        return self._select_targets(masked)

    def _encode_text(self, text: PlainText) -> MaskedTokens:
        full, start = text.prompt + text.completion, len(text.prompt)
        try:
            masked = self.encoder.encode_text(full, [(start, len(full))], add_special_tokens=True)
        except InputError as error:
            raise InvalidRecordError("the tokenizer cannot encode it", str(error)) from None
        return self._select_targets(self.encoder.append_eos(masked))

    def _select_targets(self, masked: MaskedTokens) -> MaskedTokens:
        if self.objective.train_on == "assistant":
            return masked
        return MaskedTokens(masked.ids, [True] * len(masked.ids))

    def _ensure_template(self) -> None:
        """Set a shipped template if the tokenizer has none. It is saved with the model."""
        if self.tokenizer.chat_template is None:
            name = default_chat_template(self.tokenizer)
            self.tokenizer.chat_template = load_chat_template(name, self.tokenizer)
            self.summary.default_template = name

    def _truncate(self, masked: MaskedTokens) -> MaskedTokens:
        length = len(masked.ids)
        self.summary.longest = max(self.summary.longest, length)
        if length <= self.max_tokens:
            return masked
        self.summary.num_too_long += 1
        if self.objective.truncation == "drop":
            raise InvalidRecordError(
                "longer than data.seq_len", f"{length:,} tokens, but at most {self.max_tokens:,} fit"
            )
        return MaskedTokens(masked.ids[: self.max_tokens], masked.is_target[: self.max_tokens])
