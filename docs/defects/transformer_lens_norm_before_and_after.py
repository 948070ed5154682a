"""TransformerLens cannot build a model with `use_normalization_before_and_after` and LayerNorm: the code compares
`normalization_type` with "LayerNorm", but its values are "LN" and "LNPre". Found when the model was built."""

from transformer_lens import HookedTransformer, HookedTransformerConfig

sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_mlp": 64, "d_vocab": 50}
for norm in ("RMS", "LN"):
    for before_and_after in (False, True):
        config = HookedTransformerConfig(
            **sizes,
            act_fn="gelu",
            device="cpu",
            normalization_type=norm,
            use_normalization_before_and_after=before_and_after,
        )
        try:
            result = f"{sum(p.numel() for p in HookedTransformer(config).parameters())} parameters"
        except UnboundLocalError as error:
            result = f"UnboundLocalError: {error}"
        print(f"{norm}, use_normalization_before_and_after={before_and_after}: {result}")
