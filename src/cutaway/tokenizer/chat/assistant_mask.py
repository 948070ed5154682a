"""Token ids of a conversation, and the mask of the tokens that the assistant generates."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import tokenizers

from cutaway.errors import InputError
from cutaway.tokenizer.chat.assistant_turns import AssistantTurnFinder
from cutaway.tokenizer.chat.generation_blocks import Span
from cutaway.tokenizer.chat.sandbox import TEMPLATE_TIME
from cutaway.tokenizer.chat.template import Message
from cutaway.tokenizer.tokenizer import Tokenizer, validate_text

FIXED_TIME = datetime(2025, 1, 1)
"""Time of templates that write the date, so that the tokens of a conversation do not depend on the day."""


class MaskedTokens(NamedTuple):
    """Token ids of a text, and for each token whether the model should generate it."""

    ids: list[int]
    is_target: list[bool]


@dataclass(frozen=True)
class _TemplateKey:
    template: str
    with_tools: bool


class AssistantMaskEncoder:
    """Encodes conversations, with masks of the assistant's tokens.

    A token is a target if its first character is in an assistant turn (see `assistant_turns`), or if it contains the
    turn's last character. So a token that starts in the generation prompt and continues in the turn is not a target,
    because the model is never prompted in the middle of a token. A token that ends the turn is always a target, also if
    it includes the following line break.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_token_ids: Iterable[int] = ()) -> None:
        """`stop_token_ids`: tokens that end generation, in addition to EOS."""
        self.tokenizer = tokenizer
        self._backend = _backend_with_exact_offsets(tokenizer.backend)
        self._finders: dict[_TemplateKey, AssistantTurnFinder] = {}
        added = tokenizer.backend.get_added_tokens_decoder()
        self.special_tokens = [token.content for token in added.values() if token.special]
        self.special_tokens += tokenizer.special_tokens_map.values()
        self.added_tokens = [token.content for token in added.values()]
        ids = [*stop_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        self.stop_tokens = [token for token_id in ids if (token := tokenizer.id_to_token(token_id)) is not None]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        train_on: Sequence[bool] | None = None,
    ) -> MaskedTokens:
        """Encode a conversation. The assistant's tokens are targets.

        Args:
            messages: Messages with role, content and other keys that the template reads.
            tools: Tools that the template describes to the model.
            train_on: For each message, whether its tokens are targets if it is a message of the assistant.
        """
        finder = self.turn_finder(with_tools=tools is not None)
        time = TEMPLATE_TIME.set(FIXED_TIME)
        try:
            text, turns = finder.find(messages, tools)
        finally:
            TEMPLATE_TIME.reset(time)
        if train_on is not None and not all(train_on):
            if any(turn.message is None for turn in turns):
                raise InputError(
                    "some assistant messages are not to be trained on, but the chat template does not have one"
                    " generation block per assistant message, so that they cannot be told apart; use another"
                    " data.chat_template"
                )
            turns = [turn for turn in turns if turn.message is not None and train_on[turn.message]]
        masked = self.encode_text(text, [(turn.start, turn.end) for turn in turns])
        if turns and not turns[-1].has_end_token:
            return self.append_eos(masked)
        return masked

    def encode_text(self, text: str, spans: Sequence[Span], *, add_special_tokens: bool = False) -> MaskedTokens:
        """Encode a text. Tokens whose first character is in a span are targets, and those with its last character.

        The last character of an assistant turn belongs to the token that ends the turn. Special tokens that the
        tokenizer adds (`add_special_tokens`) are not targets.
        """
        encoding = self._backend.encode(validate_text(text), add_special_tokens=False)
        is_start, is_last = bytearray(len(text) + 1), bytearray(len(text) + 1)
        for start, end in spans:
            is_start[start:end] = b"\1" * (end - start)
            is_last[end - 1] = 1
        is_target = [bool(is_start[first]) or any(is_last[first:last]) for first, last in encoding.offsets]
        if not add_special_tokens:
            return MaskedTokens(encoding.ids, is_target)
        full = self.tokenizer.encode(text)
        num_added = len(full) - len(encoding.ids)
        for num_before in range(num_added + 1):
            if full[num_before : num_before + len(encoding.ids)] == encoding.ids:
                after = [False] * (num_added - num_before)
                return MaskedTokens(full, [False] * num_before + is_target + after)
        raise InputError("the tokenizer encodes this text differently with special tokens; use another tokenizer")

    def append_eos(self, masked: MaskedTokens) -> MaskedTokens:
        """Append EOS as a target, unless the last token is EOS."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise InputError(
                "a turn must end with a token at which generation stops, but the chat template writes none and the"
                " tokenizer has no EOS token; use another tokenizer, or set data.chat_template"
            )
        if masked.ids and masked.ids[-1] == eos:
            return MaskedTokens(masked.ids, [*masked.is_target[:-1], True])
        return MaskedTokens([*masked.ids, eos], [*masked.is_target, True])

    @property
    def end_tokens(self) -> list[str]:
        """Tokens that end a turn in the chat templates used so far."""
        return [finder.end_token for finder in self._finders.values() if finder.end_token is not None]

    def turn_finder(self, *, with_tools: bool) -> AssistantTurnFinder:
        """The finder of assistant turns for the tokenizer's chat template."""
        tokenizer = self.tokenizer
        template = tokenizer.select_chat_template(None, with_tools=with_tools)
        key = _TemplateKey(template, with_tools)
        if key not in self._finders:
            self._finders[key] = AssistantTurnFinder(
                template,
                lambda messages, tools, add_generation_prompt: tokenizer.render_chat(
                    messages, tools=tools, add_generation_prompt=add_generation_prompt, chat_template=template
                ),
                special_tokens=self.special_tokens,
                added_tokens=self.added_tokens,
                stop_tokens=self.stop_tokens,
            )
        return self._finders[key]


def _backend_with_exact_offsets(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the backend, or a copy that does not remove leading and trailing spaces from the offsets of tokens.

    Byte-level post-processors remove them (`trim_offsets`). A token's first character would be unknown.
    """
    if backend.post_processor is None:
        return backend
    if b'"trim_offsets":true' not in backend.post_processor.__getstate__():
        return backend
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = backend.encode_special_tokens
    copy.post_processor = None
    return copy
