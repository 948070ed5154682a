"""Tiny configurations of each architecture, without dropout, for tests and examples."""

from functools import partial

from cutaway.config.attention import LatentAttention, MultiHead
from cutaway.config.ffn import ExpertGroups, Gated, Moe, Router
from cutaway.config.head import LMHead
from cutaway.config.norms import RMSNorm
from cutaway.config.positions import LearnedPosition
from cutaway.config.presets.decoders_gemma import gemma_like
from cutaway.config.presets.decoders_gpt2 import gpt2
from cutaway.config.presets.decoders_llama import llama
from cutaway.config.presets.decoders_moe import DEEPSEEK_V3_FFN, moe_llama
from cutaway.config.presets.encoder_decoders import BART_EMBEDDING, bart_like, t5
from cutaway.config.presets.encoders import albert, bert_like, modernbert
from cutaway.config.presets.preset_table import PresetTable, Size
from cutaway.config.stack import Block, SandwichNorm
from cutaway.config.transformer import Decoder


def tiny_mla() -> Decoder:
    """DeepSeek-V3's architecture: latent attention, one dense layer, then MoE with group-limited routing."""
    attention = LatentAttention(heads=4, q_rank=24, kv_rank=16, d_nope=16, d_rope=8, d_value=16)
    routing = {"router.top_k": 2, "router.groups": ExpertGroups(num_groups=4, top_k=2)}
    ffn = DEEPSEEK_V3_FFN.replace({"experts": 8, "expert.hidden": 32, "shared.hidden": 32, **routing})
    dense_blocks = (Block(attention=attention, ffn=Gated(hidden=128)),)
    return moe_llama(256, Size(64, 3, 4), attention, ffn, context=128, norm=RMSNorm(), leading_blocks=dense_blocks)


def tiny_gemma() -> Decoder:
    """Gemma 2's architecture, with a window of 8 tokens in every other layer."""
    far = MultiHead(heads=4, kv_heads=2, d_head=16, softcap=50.0)
    pattern, head = (far.replace(window=8), far), LMHead(softcap=30.0)
    return gemma_like(256, Size(48, 4, 4, 2, 96), pattern, context=128, head=head, placement=SandwichNorm())


TINY_MOE_FFN = Moe(experts=4, router=Router(top_k=2), expert=Gated(hidden=64))
TINY_BART_EMBEDDING = BART_EMBEDDING.replace({"position.length": 64, "dropout": 0.0})
TINY_POSITION = LearnedPosition(length=64)
TINY_T5 = partial(t5, Size(32, 2, 4, None, 64), vocab_size=256, d_head=8, dropout=0.0)

PRESETS: PresetTable = {
    "tiny-gpt": partial(gpt2, Size(32, 2, 4), context=64, vocab_size=257, dropout=0.0),
    "tiny-llama": partial(llama, 256, Size(64, 4, 4, 2, 128), context=128),
    "tiny-gemma": tiny_gemma,
    "tiny-moe": partial(moe_llama, 256, Size(64, 3, 4), MultiHead(heads=4, kv_heads=2), TINY_MOE_FFN, context=128),
    "tiny-mla": tiny_mla,
    "tiny-bert": partial(bert_like, 256, Size(32, 2, 4), dropout=0.0, position=TINY_POSITION, mlm=True),
    "tiny-albert": partial(albert, Size(64, 4, 4), vocab_size=256, width=16, position=TINY_POSITION),
    "tiny-modernbert": partial(modernbert, Size(48, 4, 4, None, 72), vocab_size=256, context=128, window=9),
    "tiny-t5": TINY_T5,
    "tiny-t5-gated": partial(TINY_T5, gated=True, shared_bias=False),
    "tiny-bart": partial(bart_like, 256, Size(32, 2, 4), "gelu", TINY_BART_EMBEDDING, context=64),
}
