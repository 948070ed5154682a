"""What a Transformer is, as data. No torch here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cutaway.callable_module import make_callable
from cutaway.config.attention import Attention, Cross, Heads, Latent, MultiHead, QKNorm
from cutaway.config.embedding import Embedding, Factor, Head, NoHead, Transform
from cutaway.config.ffn import FFN, Activation, ClampedSwiGLU, DenseFFN, Gated, Groups, Mlp, Moe, Router
from cutaway.config.initialisation import Init, Normal, Small, T5Init, Xavier
from cutaway.config.norms import LayerNorm, NoNorm, Norm, RMSNorm
from cutaway.config.positions import (
    Alibi,
    DynamicNTK,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    NoPosition,
    NoScaling,
    RelativeBias,
    Rope,
    Sinusoidal,
    Yarn,
)
from cutaway.config.source import config, schema, to_dict, to_json, to_toml
from cutaway.config.stack import Block, CrossBlock, CrossStack, Output, Parallel, Post, Pre, Sandwich, Stack
from cutaway.config.transformer import Config, Decoder, Encoder, EncoderDecoder

if TYPE_CHECKING:
    from cutaway.config.presets import presets as presets

__all__ = [
    "FFN",
    "Activation",
    "Alibi",
    "Attention",
    "Block",
    "ClampedSwiGLU",
    "Config",
    "Cross",
    "CrossBlock",
    "CrossStack",
    "Decoder",
    "DenseFFN",
    "DynamicNTK",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "Factor",
    "Gated",
    "Groups",
    "Head",
    "Heads",
    "Init",
    "Latent",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongRope",
    "Mlp",
    "Moe",
    "MultiHead",
    "NoHead",
    "NoNorm",
    "NoPosition",
    "NoScaling",
    "Norm",
    "Normal",
    "Output",
    "Parallel",
    "Post",
    "Pre",
    "QKNorm",
    "RMSNorm",
    "RelativeBias",
    "Rope",
    "Router",
    "Sandwich",
    "Sinusoidal",
    "Small",
    "Stack",
    "T5Init",
    "Transform",
    "Xavier",
    "Yarn",
    "config",
    "presets",
    "schema",
    "to_dict",
    "to_json",
    "to_toml",
]

make_callable(__name__, config)


def __getattr__(name: str) -> Any:
    if name == "presets":  # a thousand lines of tables that a file's reader does not need; it can be called too
        return import_module("cutaway.config.presets")
    raise AttributeError(f"cutaway.config has no '{name}'")
