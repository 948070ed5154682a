"""Model configuration as frozen data (pydantic tagged unions), presets, TOML and JSON. Imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cutaway.callable_module import make_callable
from cutaway.config.attention import Attention, Cross, LatentAttention, MultiHead, MultiHeadBase, QKNorm
from cutaway.config.embedding import Embedding, FactorizedEmbedding
from cutaway.config.ffn import FFN, Activation, ClampedSwiGLU, DenseFFN, ExpertGroups, Gated, Mlp, Moe, Router
from cutaway.config.head import (
    EmbeddingHead,
    EmbeddingProjection,
    HeadTransform,
    LMHead,
    MultipleChoiceHead,
    NoHead,
    OutputHead,
    SequenceClassificationHead,
    TaskHead,
    TokenClassificationHead,
)
from cutaway.config.init_scheme import Init, NormalInit, SmallInit, T5Init, XavierInit
from cutaway.config.lora import LoRA
from cutaway.config.norms import LayerNorm, NoNorm, Norm, RMSNorm
from cutaway.config.positions import (
    Alibi,
    Disentangled,
    DynamicNTK,
    LearnedPosition,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    NoPosition,
    NoScaling,
    RelativeBias,
    Rope,
    SinusoidalPosition,
    Yarn,
)
from cutaway.config.serialization import config, schema, to_dict, to_json, to_toml
from cutaway.config.stack import (
    Block,
    CrossBlock,
    CrossStack,
    OutputNorm,
    ParallelResidual,
    PostNorm,
    PreNorm,
    SandwichNorm,
    Stack,
)
from cutaway.config.transformer import Config, Decoder, Encoder, EncoderDecoder

if TYPE_CHECKING:
    from cutaway.config.presets import presets

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
    "Disentangled",
    "DynamicNTK",
    "Embedding",
    "EmbeddingHead",
    "EmbeddingProjection",
    "Encoder",
    "EncoderDecoder",
    "ExpertGroups",
    "FactorizedEmbedding",
    "Gated",
    "HeadTransform",
    "Init",
    "LMHead",
    "LatentAttention",
    "LayerNorm",
    "LearnedPosition",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "LongRope",
    "Mlp",
    "Moe",
    "MultiHead",
    "MultiHeadBase",
    "MultipleChoiceHead",
    "NoHead",
    "NoNorm",
    "NoPosition",
    "NoScaling",
    "Norm",
    "NormalInit",
    "OutputHead",
    "OutputNorm",
    "ParallelResidual",
    "PostNorm",
    "PreNorm",
    "QKNorm",
    "RMSNorm",
    "RelativeBias",
    "Rope",
    "Router",
    "SandwichNorm",
    "SequenceClassificationHead",
    "SinusoidalPosition",
    "SmallInit",
    "Stack",
    "T5Init",
    "TaskHead",
    "TokenClassificationHead",
    "XavierInit",
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
    if name == "presets":  # imported on first use, because it has a thousand lines of tables; it is callable too
        return import_module("cutaway.config.presets")
    raise AttributeError(f"cutaway.config has no '{name}'")
