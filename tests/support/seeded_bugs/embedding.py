"""Seeded bugs in the token embedding: token ids that are clamped, wrapped or shifted."""

from support.seeded_bugs.reference_gpt import ReferenceGPT
from support.seeded_bugs.registry import seeded_bug
from torch import nn


def map_token_ids(function: object) -> ReferenceGPT:
    """A model whose embedding looks up `function(token id)`."""
    model = ReferenceGPT()

    class MappedEmbedding(nn.Embedding):
        def forward(self, tokens: object) -> object:  # type: ignore[override]
            return super().forward(function(tokens))  # type: ignore[operator]

    embed = MappedEmbedding(*model.embed.weight.shape)
    embed.weight = model.embed.weight
    model.embed = embed
    return model.eval()


@seeded_bug("token-ids")
def clamped_token_ids() -> ReferenceGPT:
    return map_token_ids(lambda tokens: tokens.clamp(max=57))


@seeded_bug("token-ids")
def token_ids_modulo_32() -> ReferenceGPT:
    return map_token_ids(lambda tokens: tokens % 32)


@seeded_bug("token-ids")
def padding_id_replaces_token_3() -> ReferenceGPT:
    return map_token_ids(lambda tokens: tokens.masked_fill(tokens == 3, 0))
