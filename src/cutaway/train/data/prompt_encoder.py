"""Encoder of the records of objective grpo: a prompt, and columns for the reward functions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.chat.assistant_mask import AssistantMaskEncoder
from cutaway.tokenizer.chat.shipped_templates import default_chat_template, load_chat_template
from cutaway.train.data.chat_formats import parse_messages_text, read_content, read_tools
from cutaway.train.data.datasets import Row
from cutaway.train.data.record_encoder import RecordEncoder
from cutaway.train.data.records import InvalidRecordError, Record, RecordDataset, RecordSplits
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.rollouts.rewards import GIVEN_ARGUMENTS, load_reward_functions

NUM_EXAMPLES = 3
"""Number of prompts that are shown before training."""
RESERVED_COLUMNS = {*GIVEN_ARGUMENTS, "prompt", "completion"}
"""Columns that are not passed to reward functions."""


class PromptBatch(NamedTuple):
    """Prompts, as tokens and as given in the records, and the other columns of the records."""

    prompt_ids: list[list[int]]
    prompts: list[Any]
    """Texts or lists of messages."""
    columns: dict[str, list[Any]]
    """Values by column. A record without a column has the value None."""

    def repeat(self, count: int) -> "PromptBatch":
        """Each prompt `count` times, one after another."""

        def repeat(values: list[Any]) -> list[Any]:
            return [value for value in values for _ in range(count)]

        columns = {name: repeat(values) for name, values in self.columns.items()}
        return PromptBatch(repeat(self.prompt_ids), repeat(self.prompts), columns)

    def padded_tokens(self, pad_id: int = 0) -> Int64[Tensor, "B T"]:
        """Tokens of the prompts, padded on the right."""
        width = max(2, *map(len, self.prompt_ids))
        return torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in self.prompt_ids])


class PromptDataset(RecordDataset[PromptBatch]):
    """Prompts of records. A row has the tokens of the prompt and the index of its record."""

    def __init__(
        self,
        rows: Sequence[Row],
        records: Sequence[Record],
        columns: Sequence[str],
        seed: int,
        objective: GRPOConfig,
        *,
        shuffle: bool,
    ) -> None:
        super().__init__(rows, seed, shuffle=shuffle)
        self.records, self.columns = records, columns
        self.max_len += objective.max_new_tokens
        self.sequences_per_row = objective.num_generations

    def collate(self, rows: Sequence[Row]) -> PromptBatch:
        fields = [self.records[int(row[1][0])].fields for row in rows]
        return PromptBatch(
            [row[0].tolist() for row in rows],
            [each["prompt"] for each in fields],
            {name: [each.get(name) for each in fields] for name in self.columns},
        )


class PromptEncoder(RecordEncoder):
    """Encodes prompts: texts, or messages, which are rendered with the chat template.

    A row has the tokens of the prompt, and the index of its record.
    """

    def __init__(
        self, objective: GRPOConfig, max_len: int, tokenizer: Tokenizer, stop_token_ids: Sequence[int] = ()
    ) -> None:
        """`max_len`: maximum number of tokens of a prompt and its completion."""
        if max_len <= objective.max_new_tokens:
            raise InputError(
                f"objective.max_new_tokens is {objective.max_new_tokens}, but prompt and completion together may have"
                f" at most {max_len} tokens (data.seq_len, limited by the context of the model); lower it, or raise"
                " data.seq_len"
            )
        self.objective, self.tokenizer = objective, tokenizer
        self.max_prompt_len = max_len - objective.max_new_tokens
        self.reward_functions = load_reward_functions(objective.reward)
        self.mask_encoder = AssistantMaskEncoder(tokenizer, stop_token_ids=stop_token_ids)
        self.records: list[Record] = []
        self.columns: dict[str, None] = {}
        """Names of the columns for reward functions, in the order of their first record."""
        self.num_chats = 0
        self.default_template: str | None = None

    def encode(self, record: Record) -> Row:
        prompt = parse_messages_text(record.fields.get("prompt"))
        if prompt is None:
            keys = ", ".join(record.fields) or "none"
            hint = "; rename messages to prompt" if "messages" in record.fields else ""
            raise InvalidRecordError(
                "no prompt", f"its keys are {keys}; objective grpo needs prompt, a text or messages{hint}"
            )
        if isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt):
            prompt = [{**message, "content": read_content(message, i)} for i, message in enumerate(prompt)]
        ids = self._encode_prompt(prompt, record)
        if not ids:
            raise InvalidRecordError("empty prompt", "prompt has no tokens")
        if len(ids) > self.max_prompt_len:
            raise InvalidRecordError(
                "longer than data.seq_len − objective.max_new_tokens",
                f"the prompt has {len(ids):,} tokens, but at most {self.max_prompt_len:,} fit",
            )
        self.records.append(replace(record, fields=record.fields | {"prompt": prompt}))
        self.columns |= dict.fromkeys(name for name in record.fields if name not in RESERVED_COLUMNS)
        return np.array(ids, np.int64), np.array([len(self.records) - 1], np.int64)

    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> PromptDataset:
        return PromptDataset(rows, self.records, list(self.columns), seed, self.objective, shuffle=shuffle)

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Any) -> Metrics:
        for function in self.reward_functions:
            function.check_columns(self.columns)
        if self.default_template is not None:
            log(
                f"the model has no chat template; using '{self.default_template}', which is saved with the model"
                " (data.chat_template)"
            )
        longest = max(len(row[0]) for row in rows)
        columns = f"; columns for rewards: {', '.join(self.columns)}" if self.columns else ""
        log(
            f"data: {len(rows):,} training prompts, {len(splits.validation):,} validation prompts; longest prompt"
            f" {longest:,} tokens{columns}"
        )
        statistics = {
            "num_records": len(rows),
            "num_validation_records": len(splits.validation),
            "longest_prompt": longest,
            "columns": list(self.columns),
        }
        return {"statistics": statistics, "examples": [self._describe_row(row) for row in rows[:NUM_EXAMPLES]]}

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn in the chat template, at which generation stops."""
        tokens = self.mask_encoder.end_tokens if self.num_chats else []
        return frozenset(i for token in tokens if (i := self.tokenizer.token_to_id(token)) is not None)

    def _encode_prompt(self, prompt: object, record: Record) -> list[int]:
        if isinstance(prompt, str):
            try:
                return self.tokenizer.encode(prompt)
            except InputError as error:
                raise InvalidRecordError("the tokenizer cannot encode it", str(error)) from None
        if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt) or not prompt:
            raise InvalidRecordError(
                "invalid prompt", f"prompt is a {type(prompt).__name__}; it must be a text or a list of messages"
            )
        if self.tokenizer.chat_template is None:
            self.default_template = default_chat_template(self.tokenizer)
            self.tokenizer.chat_template = load_chat_template(self.default_template, self.tokenizer)
        tools = read_tools(record.fields)
        self.mask_encoder.turn_finder(with_tools=tools is not None)  # an invalid template ends the run
        try:
            ids = self.tokenizer.encode_chat(prompt, **({} if tools is None else {"tools": tools}))
        except InputError as error:
            raise InvalidRecordError("the chat template cannot encode it", str(error)) from None
        self.num_chats += 1
        return ids

    def _describe_row(self, row: Row) -> Metrics:
        """Prompt and columns of a row, as segments of an example."""
        text = self.tokenizer.decode(row[0].tolist(), skip_special_tokens=False)
        fields = self.records[int(row[1][0])].fields
        columns = "".join(f"\n  {name}: {fields[name]}" for name in self.columns if name in fields)
        return {"segments": [{"text": text + columns, "target": False}]}
