"""Seeded bugs in config fields, buffers, tied weights, unused parameters, saving, modes and hooks."""

from typing import Any

import torch
import transformers
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor, nn
from torch.nn import functional as F

SMALL_CONFIG = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def build_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL_CONFIG, **NO_SPECIAL_TOKENS, intermediate_size=48, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config).eval()


# config-fields


@seeded_bug("config-fields")
def window_dropped() -> tuple[ReferenceGPT, dict[str, Any]]:
    def build(window: int | None) -> ReferenceGPT:
        model = ReferenceGPT(window=window)
        for block in model.blocks:
            block.attention.window = None
        return model

    model = build(None)
    return model, check_kwargs(model) | {
        "config_variants": lambda: {"window": lambda: lambda tokens: build(4)(tokens)[0]}
    }


class UncappedGemma2(transformers.Gemma2ForCausalLM):
    """Ignores final_logit_softcapping of its configuration."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        softcap, self.config.final_logit_softcapping = self.config.final_logit_softcapping, None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.config.final_logit_softcapping = softcap


@seeded_bug("config-fields")
def softcap_dropped() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    config = (
        SMALL_CONFIG
        | NO_SPECIAL_TOKENS
        | {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2, "initializer_range": 0.2}
    )
    return UncappedGemma2(transformers.Gemma2Config(**config)).eval(), {}


# meta-buffers


class BufferedFrequencies(ReferenceGPT):
    """Frequencies in a non-persistent buffer that is computed in __init__ only."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            attention = block.attention
            attention.register_buffer("inv_freq", attention.frequencies(attention.q.weight.device), persistent=False)
            attention.frequencies = lambda device, attention=attention: attention.inv_freq


@seeded_bug("meta-buffers")
def frequencies_lost_on_meta_device() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = BufferedFrequencies()

    def load_from_meta() -> nn.Module:
        loaded = BufferedFrequencies()
        for block in loaded.blocks:
            block.attention.inv_freq.zero_()  # the usual content of newly allocated memory
        loaded.load_state_dict(model.state_dict())
        return loaded

    return model, check_kwargs(model) | {"load_from_meta": load_from_meta}


@seeded_bug("meta-buffers")
def nan_buffer() -> ReferenceGPT:
    model = ReferenceGPT()
    model.register_buffer("statistics", torch.full((4,), torch.nan))
    return model


@seeded_bug("meta-buffers", also_caught_by=("save-load", "parity", "rope-scaling"))
def wrong_inv_freq() -> tuple[Any, dict[str, Any]]:
    model = build_llama()
    model.model.rotary_emb.inv_freq.mul_(0.9)
    return model, {}


# tied-weights


@seeded_bug("tied-weights")
def head_copied() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    return model, check_kwargs(model) | {"tied_embeddings": True}


@seeded_bug("tied-weights")
def tied_against_config() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    return model, check_kwargs(model) | {"tied_embeddings": False}


@seeded_bug("tied-weights")
def tie_lost_on_load() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()
    return model, check_kwargs(model) | {"build_module": lambda: ReferenceGPT(tied=False)}


@seeded_bug("tied-weights", also_caught_by=("save-load", "parity"))
def transformers_head_copied() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "initializer_range": 0.2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **NO_SPECIAL_TOKENS)).eval()
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())
    return model, {}


# unused-parameters


@seeded_bug("unused-parameters")
def layer_never_called() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1].gate = nn.Linear(32, 32)
    return model


@seeded_bug("unused-parameters")
def bias_unused() -> ReferenceGPT:
    model = ReferenceGPT()
    up = model.blocks[0].up
    up.forward = lambda x: F.linear(x, up.weight)  # type: ignore[method-assign]
    return model


class NormNotSaved(ReferenceGPT):
    """Its state dict has no final norm, so loading leaves a newly initialized one."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop("norm.weight", None)
        return state


@seeded_bug("unused-parameters", also_caught_by=("save-load",))
def norm_not_saved() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = NormNotSaved()
    return model, check_kwargs(model) | {"build_module": NormNotSaved}


# save-load


class UnsavedTemperature(ReferenceGPT):
    """A learned temperature in a plain attribute, which is not in the state dict."""

    temperature = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, state = super().forward(*args, **kwargs)
        return logits / self.temperature, state


@seeded_bug("save-load")
def temperature_not_saved() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = UnsavedTemperature()
    model.temperature = 1.01
    return model, check_kwargs(model) | {"build_module": UnsavedTemperature}


@seeded_bug("save-load")
def matrix_transposed_on_load() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()

    def reload_logits() -> Any:
        reloaded = ReferenceGPT()
        reloaded.load_state_dict(model.state_dict())
        reloaded.blocks[1].attention.o.weight = nn.Parameter(reloaded.blocks[1].attention.o.weight.T.clone())
        return lambda tokens: reloaded(tokens)[0]

    return model, check_kwargs(model) | {"reload_logits": reload_logits}


# evaluation mode and hooks


@seeded_bug("eval-determinism")
def noise_in_eval() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.norm.forward
    model.norm.forward = lambda x: original(x + 1e-3 * torch.rand_like(x))  # type: ignore[method-assign]
    return model


@seeded_bug("mode-restored")
def generate_leaves_training_mode() -> tuple[ReferenceGPT, dict[str, Any]]:
    model = ReferenceGPT()

    def generate(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        out = ReferenceGPT.generate(model, tokens, n, mask)
        model.train()
        return out

    model.generate = generate  # type: ignore[method-assign]
    return model, check_kwargs(model)


@seeded_bug("eval-dropout", also_caught_by=("eval-determinism",))
def dropout_ignores_training_flag() -> ReferenceGPT:
    model = ReferenceGPT()
    for block in model.blocks:
        attention = block.attention
        attention.pattern = lambda scores: F.dropout(scores.softmax(-1), 0.1)
    return model


@seeded_bug("eval-dropout", also_caught_by=("eval-determinism",))
def dropout_outside_module_tree() -> ReferenceGPT:
    """eval() does not reach modules in a plain list."""
    model = ReferenceGPT()
    modules = [nn.Dropout(0.1)]
    original = model.norm.forward
    model.norm.forward = lambda x: modules[0](original(x))  # type: ignore[method-assign]
    return model


@seeded_bug("eval-dropout", also_caught_by=("eval-determinism",))
def manual_dropout_mask() -> ReferenceGPT:
    model = ReferenceGPT()
    original = model.norm.forward
    model.norm.forward = lambda x: original(x) * torch.bernoulli(torch.full_like(x, 0.9))  # type: ignore[method-assign]
    return model


class DirectForward(nn.Module):
    """Calls inner.forward(…) instead of inner(…)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner.forward(*args)


@seeded_bug("forward-hooks", also_caught_by=("cache-unused-slots",))
def forward_bypasses_hooks() -> ReferenceGPT:
    model = ReferenceGPT()
    model.blocks[1] = DirectForward(model.blocks[1])
    return model


@seeded_bug("forward-hooks")
def hook_changes_output() -> ReferenceGPT:
    model = ReferenceGPT()
    norm = model.norm
    original = norm.forward
    norm.forward = lambda x: original(x) * (1.001 if norm._forward_hooks else 1.0)  # type: ignore[method-assign]
    return model
