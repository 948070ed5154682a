"""linear-attention-transformer: linear and local attention heads; `Autopadder` pads texts to whole buckets."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

NAME = "linear-attention-transformer"
HOMEPAGE = "https://github.com/lucidrains/linear-attention-transformer"
REQUIREMENTS = (
    "linear-attention-transformer==0.19.1",
    "einops==0.8.2",
    "local-attention==1.11.2",
    "axial-positional-embedding==0.3.12",
    "product-key-memory==0.3.0",
    "hyper-connections==0.4.11",
    "torch-einops-utils==0.2.0",
)
LENGTH, VOCAB = 96, 64
Options = dict[str, Any]
SIZES: Options = {
    "num_tokens": VOCAB,
    "max_seq_len": LENGTH,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "dim_head": 8,
    "local_attn_window_size": 8,
}
ROTARY: Options = {"use_rotary_emb": True}
LOCAL: Options = {"n_local_attn_heads": 2}
OPTIONS: dict[str, Options] = {
    "axial positions": {},
    "learned positions": {"use_axial_pos_emb": False},
    "rotary": ROTARY,
    "rotary, local attention heads": {**ROTARY, **LOCAL},
    "rotary, local attention heads only": {**ROTARY, "n_local_attn_heads": 4},
    "rotary, reversible": {**ROTARY, "reversible": True},
    "rotary, shifted tokens": {**ROTARY, "shift_tokens": True},
    "axial attention, local attention heads": {**LOCAL, "attend_axially": True, "use_axial_pos_emb": False},
    "rotary, axial attention, local attention heads": {**ROTARY, **LOCAL, "attend_axially": True},
    "rotary, factorized embeddings": {**ROTARY, "emb_dim": 16},
    "rotary, feed-forward in chunks": {**ROTARY, "ff_chunks": 2},
}
DECODERS: dict[str, Options] = {
    "rotary, blind spot of 4": {**ROTARY, "blindspot_size": 4},
    "rotary, blind spot of 4, local attention heads": {**ROTARY, **LOCAL, "blindspot_size": 4},
}
VARIANTS: dict[str, Options] = {
    "ff_glu": {"ff_glu": True},
    "blindspot_size": {"blindspot_size": 4},
    "n_local_attn_heads": LOCAL,
    "attend_axially": {**LOCAL, "attend_axially": True},
    "shift_tokens": {"shift_tokens": True},
    "use_axial_pos_emb": {"use_rotary_emb": False},
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for kind in ("decoder", "encoder"):
        for name, options in (OPTIONS | (DECODERS if kind == "decoder" else {})).items():
            yield f"{kind}, {name}", partial(make, kind, options)
    yield "options of a decoder", make_variants


def build_model(kind: str, options: Options) -> nn.Module:
    from linear_attention_transformer import LinearAttentionTransformerLM

    return LinearAttentionTransformerLM(**SIZES, causal=kind == "decoder", **options).eval()


def make(kind: str, options: Options) -> tuple[nn.Module, Options]:
    from linear_attention_transformer.autopadder import Autopadder
    from linear_attention_transformer.autoregressive_wrapper import AutoregressiveWrapper

    def build() -> nn.Module:
        return Autopadder(build_model(kind, options)).eval()

    model = build()
    wrapper = AutoregressiveWrapper(model.net)
    wrapper.net = model  # so that both are in the same mode
    arguments = {
        "kind": kind,
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "logits": lambda tokens: model(tokens),
        "logits_with_mask": lambda tokens, mask: model(tokens, input_mask=mask),
        "positions_skip_padding": False,
        "trained": False,
    }
    if kind == "decoder":
        arguments |= {
            "padding_side": "right",
            "generate": partial(generate, wrapper),
        }
    return model, arguments


def generate(wrapper: nn.Module, tokens: Tensor, count: int) -> Tensor:
    """`filter_thres` is the share of tokens that are removed; one of 64 remains."""
    return wrapper.generate(tokens, count, filter_thres=0.98)


def make_variants() -> tuple[nn.Module, Options]:
    """Each option of VARIANTS must change the logits."""
    model = build_model("decoder", ROTARY)

    def build_variant(changes: Options) -> Callable[[Tensor], Tensor]:
        variant, weights = build_model("decoder", ROTARY | changes), model.state_dict()
        own = variant.state_dict()
        same = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
        variant.load_state_dict(same, strict=False)
        return lambda tokens: variant(tokens)

    def build_variants() -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
        return {name: partial(build_variant, changes) for name, changes in VARIANTS.items()}

    arguments = {"config_variants": build_variants, "multiple": 8, "vocab_size": VOCAB, "max_seq_len": LENGTH}
    return model, arguments | {"only": ["config-fields"]}
