"""linear-attention-transformer ignores `ff_glu` and `ff_dropout` in all layers but those of axial attention and of
context, and `pkm_num_keys` in all: the layers are built without them. `heads` is used. Found by `config-fields`."""

from linear_attention_transformer import LinearAttentionTransformerLM


def describe(**options: object) -> str:
    sizes = {"num_tokens": 64, "dim": 32, "depth": 2, "max_seq_len": 64, "local_attn_window_size": 8, "dim_head": 8}
    model = LinearAttentionTransformerLM(**sizes, **options)
    dropouts = {module.p for module in model.modules() if type(module).__name__ == "Dropout"}
    return f"{sum(parameter.numel() for parameter in model.parameters())} parameters, dropout {sorted(dropouts)}"


for options in ({"heads": 4}, {"heads": 2}, {"ff_glu": True}, {"ff_dropout": 0.5}):
    print(f"{options}: {describe(**{'heads': 4, **options})}")
for count in (128, 16):
    print(f"pkm_num_keys={count}: {describe(heads=4, pkm_layers=(1, 2), pkm_num_keys=count)}")
