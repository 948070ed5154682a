"""The forward pass: token ids in, logits out."""

from cutaway.model.cache import Cache
from cutaway.model.kernels import KERNELS
from cutaway.model.transformer import DecoderOnly, EncoderDecoder, EncoderOnly, Transformer, build

__all__ = ["KERNELS", "Cache", "DecoderOnly", "EncoderDecoder", "EncoderOnly", "Transformer", "build"]
