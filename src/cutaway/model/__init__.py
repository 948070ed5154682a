"""The equations: tokens in, logits out."""

from cutaway.model.cache import Cache
from cutaway.model.forms import DecoderOnly, EncoderDecoder, EncoderOnly, build
from cutaway.model.kernels import KERNELS
from cutaway.model.transformer import Transformer

__all__ = ["KERNELS", "Cache", "DecoderOnly", "EncoderDecoder", "EncoderOnly", "Transformer", "build"]
