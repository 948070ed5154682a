"""A checkpoint with known answers: each token of its vocabulary has a fixed next token."""

import re
from collections.abc import Sequence

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer

END_OF_TEXT, UNKNOWN = "<eos>", "?"


def scripted_checkpoint(
    scripts: Sequence[Sequence[str]], *, chat_template: str | None = None, special_tokens: Sequence[str] = ()
) -> Checkpoint:
    """A checkpoint that writes the rest of a script, and then the end of the text, after a prompt that ends with the
    first part of the script. All other tokens of prompts are unknown. The parts must be different."""
    parts = [part for script in scripts for part in script]
    assert len(set(parts)) == len(parts) <= 60
    vocab = {part: index for index, part in enumerate([END_OF_TEXT, UNKNOWN, *parts])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    by_length = sorted(map(re.escape, parts), key=len, reverse=True)
    split = tokenizers.Regex("|".join([*by_length, r"[\s\S]"]))
    backend.pre_tokenizer = pre_tokenizers.Split(split, "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END_OF_TEXT, *special_tokens])
    tokenizer = Tokenizer(backend, special_tokens_map={"eos_token": END_OF_TEXT}, chat_template=chat_template)
    model = ct.build("tiny-llama", seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("attn.f.o.weight", "ffn.f.down.weight", "head.matrix.weight")):
                parameter.zero_()  # without attention and FFN, the logits depend on the last token only
        weights = dict(model.named_parameters())
        weights["decoder.embed.token.weight"].copy_(torch.eye(256, 64))
        for script in scripts:
            for part, following in zip(script, [*script[1:], END_OF_TEXT], strict=True):
                weights["head.matrix.weight"][vocab[following], vocab[part]] = 10.0
    return Checkpoint(model, model.config, generation_config={"eos_token_id": 0}, tokenizer_loader=lambda: tokenizer)
