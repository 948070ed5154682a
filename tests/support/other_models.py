"""Models that are not cutaway's, for tests of analyses: a LoRA wrapper with PEFT's module layout, and a plain GPT."""

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.model import Transformer


class LoraLinear(nn.Module):
    """A linear layer with a low-rank adapter, with the attribute names of `peft.tuners.lora.Linear`."""

    def __init__(self, base_layer: nn.Linear, rank: int, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.base_layer, self.merged, self.disable_adapters = base_layer, False, False
        sizes = (rank, base_layer.in_features), (base_layer.out_features, rank)
        self.lora_A, self.lora_B = (
            nn.ParameterDict({"default": 0.3 * torch.randn(size, generator=g)}) for size in sizes
        )

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def merge(self) -> None:
        assert not self.merged
        self.base_layer.weight.data += self.lora_B["default"] @ self.lora_A["default"]
        self.merged = True

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        return result if self.merged else result + x @ self.lora_A["default"].T @ self.lora_B["default"].T


class LoraModel(nn.Module):
    """The model with adapters, at the path `base_model` of a `PeftWrapper`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class PeftWrapper(nn.Module):
    """A wrapper with the layout of `peft.PeftModel`: the adapted model is at the path `base_model.model`."""

    def __init__(self, model: nn.Module, targets: tuple[str, ...], rank: int = 2) -> None:
        super().__init__()
        paths = [path for path, _ in model.named_modules() if path.endswith(targets)]
        for seed, path in enumerate(paths):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoraLinear(model.get_submodule(path), rank, seed))  # type: ignore[arg-type]
        self.base_model, self.peft_config = LoraModel(model), {"default": object()}

    @property
    def active_peft_config(self) -> object:
        return self.peft_config["default"]

    def get_base_model(self) -> nn.Module:
        return self.base_model.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)

    def merge_and_unload(self) -> nn.Module:
        """Return a copy of the model with merged adapters and no wrappers."""
        model = deepcopy(self.base_model.model)
        for path, module in list(model.named_modules()):
            if isinstance(module, LoraLinear):
                module.merge()
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, module.base_layer)
        return model


class PlainAttention(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class PlainMLP(nn.Module):
    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, hidden), nn.Linear(hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class PlainBlock(nn.Module):
    def __init__(self, d_model: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attn, self.mlp = PlainAttention(d_model, heads), PlainMLP(d_model, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    """A GPT as a tutorial would write it: pre-norm, learned positions, `model(tokens)` returns the logits."""

    def __init__(self, vocab_size: int, d_model: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, d_model), nn.Embedding(context, d_model)
        self.h = nn.ModuleList(PlainBlock(d_model, heads, 4 * d_model) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


PLAIN_SITES = {
    "blocks.{i}.resid_post": "h.{i}",
    "blocks.{i}.attn.in": "h.{i}.attn.in",
    "blocks.{i}.attn": "h.{i}.attn",
    "blocks.{i}.attn.z": "h.{i}.attn.proj.in",
    "blocks.{i}.attn.out": "h.{i}.attn",
    "blocks.{i}.resid_mid": "h.{i}.ln_2.in",
    "blocks.{i}.ffn.in": "h.{i}.mlp.in",
    "blocks.{i}.ffn.hidden": "h.{i}.mlp.down.in",
    "blocks.{i}.ffn.out": "h.{i}.mlp.out",
}
"""Sites of `PlainGPT`, as `describe_model` takes them."""


def plain_copy(model: Transformer) -> PlainGPT:
    """Return a `PlainGPT` with the weights of a cutaway model like `tiny-gpt`."""
    state, (stack,) = model.state_dict(), model.config.stacks.values()
    heads = stack.blocks[0].attention.heads
    plain = PlainGPT(model.config.vocab_size, model.config.d_model, heads, stack.layers, 64)
    names = {"ln_1": "attn.norm_in", "attn.proj": "attn.f.o", "ln_2": "ffn.norm_in", "mlp.up": "ffn.f.up"}
    names["mlp.down"] = "ffn.f.down"
    weights = {
        "wte.weight": state["decoder.embed.token.weight"],
        "wpe.weight": state["decoder.embed.position.table.weight"],
    }
    weights["lm_head.weight"] = weights["wte.weight"]
    for leaf in ("weight", "bias"):
        weights[f"ln_f.{leaf}"] = state[f"decoder.final_norm.{leaf}"]
        for layer in range(stack.layers):
            block = f"decoder.blocks.{layer}"
            qkv = [state[f"{block}.attn.f.{name}.{leaf}"] for name in "qkv"]
            weights[f"h.{layer}.attn.qkv.{leaf}"] = torch.cat(qkv)
            weights |= {f"h.{layer}.{own}.{leaf}": state[f"{block}.{other}.{leaf}"] for own, other in names.items()}
    plain.load_state_dict(weights)
    return plain.eval()
