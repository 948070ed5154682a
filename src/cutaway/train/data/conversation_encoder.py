"""Token ids and targets of conversations and texts: chat template, EOS, truncation. Used by the record encoders."""

from collections.abc import Sequence
from typing import Literal

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.chat.assistant_mask import AssistantMaskEncoder, MaskedTokens
from cutaway.tokenizer.chat.shipped_templates import default_chat_template, load_chat_template
from cutaway.train.data.chat_formats import Conversation, PlainText
from cutaway.train.data.chat_summary import ChatSummary
from cutaway.train.data.records import InvalidRecordError


class ConversationEncoder:
    """Encodes conversations with the chat template of the tokenizer, and texts followed by EOS."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_len: int,
        truncation: Literal["right", "drop"],
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """`max_len`: maximum number of input tokens. `stop_token_ids`: tokens that end generation, besides EOS."""
        # The last token is only a target, so that a sequence has one more token than the model reads.
        self.tokenizer, self.max_tokens, self.truncation = tokenizer, max_len + 1, truncation
        self.encoder = AssistantMaskEncoder(tokenizer, stop_token_ids=stop_token_ids)
        self.summary = ChatSummary(truncation=truncation, max_tokens=self.max_tokens)

    def encode(self, parsed: Conversation | PlainText) -> MaskedTokens:
        """Encode a conversation or a text. It is not truncated."""
        return self._encode_text(parsed) if isinstance(parsed, PlainText) else self._encode_chat(parsed)

    def truncate(self, masked: MaskedTokens) -> MaskedTokens:
        """Remove tokens at the end that do not fit, or raise InvalidRecordError, according to the policy."""
        length = len(masked.ids)
        self.summary.longest = max(self.summary.longest, length)
        if length <= self.max_tokens:
            return masked
        self.summary.num_too_long += 1
        if self.truncation == "drop":
            raise InvalidRecordError(
                "longer than data.seq_len", f"{length:,} tokens, but at most {self.max_tokens:,} fit"
            )
        return MaskedTokens(masked.ids[: self.max_tokens], masked.is_target[: self.max_tokens])

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
        return masked

    def _encode_text(self, text: PlainText) -> MaskedTokens:
        full, start = text.prompt + text.completion, len(text.prompt)
        try:
            masked = self.encoder.encode_text(full, [(start, len(full))], add_special_tokens=True)
        except InputError as error:
            raise InvalidRecordError("the tokenizer cannot encode it", str(error)) from None
        return self.encoder.append_eos(masked)

    def _ensure_template(self) -> None:
        """Set a shipped template if the tokenizer has none. It is saved with the model."""
        if self.tokenizer.chat_template is None:
            name = default_chat_template(self.tokenizer)
            self.tokenizer.chat_template = load_chat_template(name, self.tokenizer)
            self.summary.default_template = name
