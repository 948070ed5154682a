"""Tiny configurations of each architecture, without dropout, for tests and examples."""

from functools import partial

from cutaway.config.attention import LatentAttention, MultiHead
from cutaway.config.embedding import FactorizedEmbedding
from cutaway.config.ffn import ExpertGroups, Gated, Moe, Router
from cutaway.config.head import LMHead
from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.positions import LearnedPosition
from cutaway.config.presets.decoders_gemma import gemma_like
from cutaway.config.presets.decoders_gpt2 import gpt2
from cutaway.config.presets.decoders_llama import llama
from cutaway.config.presets.decoders_moe import moe_llama
from cutaway.config.presets.encoder_decoders import bart_like, t5
from cutaway.config.presets.encoders import bert_like, modernbert
from cutaway.config.presets.preset_table import PresetTable
from cutaway.config.stack import Block, SandwichNorm, Stack
from cutaway.config.transformer import Decoder


def tiny_mla() -> Decoder:
    """DeepSeek-V3's architecture: latent attention, one dense layer, then MoE with group-limited routing."""
    attention = LatentAttention(heads=4, q_rank=24, kv_rank=16, d_nope=16, d_rope=8, d_value=16)
    router = Router(
        score="sigmoid",
        dtype="float32",
        top_k=2,
        scale=2.5,
        selection_bias=True,
        groups=ExpertGroups(num_groups=4, top_k=2),
    )
    ffn = Moe(experts=8, router=router, expert=Gated(hidden=32), shared=Gated(hidden=32))
    return Decoder(
        vocab_size=256,
        d_model=64,
        context=128,
        decoder=Stack(
            layers=3,
            leading_blocks=(Block(attention=attention, ffn=Gated(hidden=128)),),
            block=Block(attention=attention, ffn=ffn),
            norm=RMSNorm(),
        ),
        head=LMHead(tied=False),
    )


TINY_GEMMA_ATTENTION = MultiHead(heads=4, kv_heads=2, d_head=16, softcap=50.0)
TINY_MOE_FFN = Moe(experts=4, router=Router(top_k=2), expert=Gated(hidden=64))

PRESETS: PresetTable = {
    "tiny-gpt": partial(gpt2, 32, 2, 4, context=64, vocab_size=257, dropout=0.0),
    "tiny-llama": partial(llama, 256, 64, 4, 4, 2, 128, context=128),
    "tiny-gemma": partial(
        gemma_like,
        256,
        48,
        4,
        96,
        (TINY_GEMMA_ATTENTION.replace(window=8), TINY_GEMMA_ATTENTION),
        context=128,
        placement=SandwichNorm(),
        softcap=30.0,
    ),
    "tiny-moe": partial(moe_llama, 256, 64, 3, MultiHead(heads=4, kv_heads=2), TINY_MOE_FFN, context=128),
    "tiny-mla": tiny_mla,
    "tiny-bert": partial(bert_like, 256, 32, 2, 4, dropout=0.0, position=LearnedPosition(length=64), mlm=True),
    "tiny-albert": partial(
        bert_like,
        256,
        64,
        4,
        4,
        dropout=0.0,
        activation="gelu_tanh",
        position=LearnedPosition(length=64),
        factorization=FactorizedEmbedding(width=16),
        layer_groups=1,
        pooler=True,
    ),
    "tiny-modernbert": partial(modernbert, 48, 4, 4, 72, vocab_size=256, context=128, window=9),
    "tiny-t5": partial(t5, 32, 2, 4, 64, vocab_size=256, d_head=8, dropout=0.0),
    "tiny-t5-gated": partial(t5, 32, 2, 4, 64, vocab_size=256, d_head=8, gated=True, shared_bias=False, dropout=0.0),
    "tiny-bart": partial(
        bart_like,
        256,
        32,
        2,
        4,
        context=64,
        activation="gelu",
        position=LearnedPosition(length=64, offset=2),
        embedding_norm=LayerNorm(),
        dropout=0.0,
    ),
}
