"""Small shapes of each form, without dropout, for tests and for a first look."""

from functools import partial

from cutaway.config.attention import Latent, MultiHead
from cutaway.config.embedding import Factor, Head
from cutaway.config.ffn import Gated, Groups, Moe, Router
from cutaway.config.norms import LayerNorm, RMSNorm
from cutaway.config.positions import Learned
from cutaway.config.presets.decoders_classic import gpt2
from cutaway.config.presets.decoders_gemma import gemma_shaped
from cutaway.config.presets.decoders_llama import llama
from cutaway.config.presets.decoders_moe import sparse_llama
from cutaway.config.presets.encoder_decoders import bart_shaped, t5
from cutaway.config.presets.encoders import bert_shaped, modernbert
from cutaway.config.presets.table import Table
from cutaway.config.stack import Block, Sandwich, Stack
from cutaway.config.transformer import Decoder


def tiny_mla() -> Decoder:
    """Latent attention, one dense layer, then experts chosen by groups, as in DeepSeek-V3."""
    attention = Latent(heads=4, q_rank=24, kv_rank=16, d_nope=16, d_rope=8, d_value=16)
    router = Router(score="sigmoid", top_k=2, scale=2.5, selection_bias=True, groups=Groups(count=4, keep=2))
    ffn = Moe(experts=8, router=router, expert=Gated(hidden=32), shared=Gated(hidden=32))
    return Decoder(
        vocab_size=256,
        d_model=64,
        context=128,
        decoder=Stack(
            layers=3,
            lead=(Block(attention=attention, ffn=Gated(hidden=128)),),
            block=Block(attention=attention, ffn=ffn),
            norm=RMSNorm(),
        ),
        head=Head(tied=False),
    )


FAR = MultiHead(heads=4, kv_heads=2, d_head=16, softcap=50.0)
MIXTURE = Moe(experts=4, router=Router(top_k=2), expert=Gated(hidden=64))

PRESETS: Table = {
    "tiny-gpt": partial(gpt2, 32, 2, 4, context=64, vocab_size=257, dropout=0.0),
    "tiny-llama": partial(llama, 256, 64, 4, 4, 2, 128, context=128),
    "tiny-gemma": partial(
        gemma_shaped,
        256,
        48,
        4,
        96,
        (FAR.replace(window=8), FAR),
        context=128,
        placement=Sandwich(),
        softcap=30.0,
    ),
    "tiny-moe": partial(sparse_llama, 256, 64, 3, MultiHead(heads=4, kv_heads=2), MIXTURE, context=128),
    "tiny-mla": tiny_mla,
    "tiny-bert": partial(bert_shaped, 256, 32, 2, 4, dropout=0.0, position=Learned(length=64), mlm=True),
    "tiny-albert": partial(
        bert_shaped,
        256,
        64,
        4,
        4,
        dropout=0.0,
        activation="gelu_tanh",
        position=Learned(length=64),
        factor=Factor(width=16),
        groups=1,
        pooler=True,
    ),
    "tiny-modernbert": partial(modernbert, 48, 4, 4, 72, vocab_size=256, context=128, window=9),
    "tiny-t5": partial(t5, 32, 2, 4, 64, vocab_size=256, d_head=8, dropout=0.0),
    "tiny-t5-gated": partial(t5, 32, 2, 4, 64, vocab_size=256, d_head=8, gated=True, shared_bias=False, dropout=0.0),
    "tiny-bart": partial(
        bart_shaped,
        256,
        32,
        2,
        4,
        context=64,
        activation="gelu",
        position=Learned(length=64, offset=2),
        embedding_norm=LayerNorm(),
        dropout=0.0,
    ),
}
