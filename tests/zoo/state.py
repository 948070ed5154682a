"""Bugs in what a model holds: settings that are dropped, buffers and ties that are lost, tensors that nobody reads."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.bug import bug
from zoo.home import Home, offers

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, **NONE, intermediate_size=48, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config).eval()


# ------------------------------------------------------------------------------------------------------- settings


@bug("config-fields")
def a_window_that_is_dropped() -> tuple[Home, dict[str, Any]]:
    def make(window: int | None) -> Home:
        model = Home(window=window)
        for block in model.blocks:
            block.attention.window = None
        return model

    model = make(None)
    return model, offers(model) | {"variants": lambda: {"window": lambda: lambda tokens: make(4)(tokens)[0]}}


class Uncapped(transformers.Gemma2ForCausalLM):
    """The final soft-cap is in the configuration, and in no equation."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kept, self.config.final_logit_softcapping = self.config.final_logit_softcapping, None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.config.final_logit_softcapping = kept


@bug("config-fields")
def a_soft_cap_that_is_dropped() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    how = SMALL | NONE | {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2, "initializer_range": 0.2}
    return Uncapped(transformers.Gemma2Config(**how)).eval(), {}


# -------------------------------------------------------------------------------------------------------- buffers


class Buffered(Home):
    """Frequencies in a buffer that is not saved, made in __init__ only."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            attention = block.attention
            attention.register_buffer("turns", attention.frequencies(attention.q.weight.device), persistent=False)
            attention.frequencies = lambda device, attention=attention: attention.turns


@bug("meta-buffers")
def frequencies_that_the_meta_device_loses() -> tuple[Home, dict[str, Any]]:
    model = Buffered()

    def from_shapes() -> nn.Module:
        made = Buffered()
        for block in made.blocks:
            block.attention.turns.zero_()  # what fresh memory holds, more often than not
        made.load_state_dict(model.state_dict())
        return made

    return model, offers(model) | {"from_shapes": from_shapes}


@bug("meta-buffers")
def a_buffer_of_nan() -> Home:
    model = Home()
    model.register_buffer("statistics", torch.full((4,), torch.nan))
    return model


@bug("meta-buffers", also=("export", "parity", "rope-scaling"))
def frequencies_of_another_model() -> tuple[Any, dict[str, Any]]:
    model = llama()
    model.model.rotary_emb.inv_freq.mul_(0.9)
    return model, {}


# ----------------------------------------------------------------------------------------------------------- ties


@bug("ties")
def a_head_that_was_copied() -> tuple[Home, dict[str, Any]]:
    model = Home()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    return model, offers(model) | {"tied": True}


@bug("ties")
def a_tie_against_the_configuration() -> tuple[Home, dict[str, Any]]:
    model = Home()
    return model, offers(model) | {"tied": False}


@bug("ties")
def a_tie_that_loading_loses() -> tuple[Home, dict[str, Any]]:
    model = Home()
    return model, offers(model) | {"make": lambda: Home(tied=False)}


@bug("ties", also=("export", "parity"))
def a_head_of_transformers_that_was_copied() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    how = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "initializer_range": 0.2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**how, **NONE)).eval()
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())
    return model, {}


# -------------------------------------------------------------------------------------------------------- tensors


@bug("tensors-used")
def a_layer_that_is_never_called() -> Home:
    model = Home()
    model.blocks[1].gate = nn.Linear(32, 32)
    return model


@bug("tensors-used")
def a_bias_that_is_forgotten() -> Home:
    model = Home()
    up = model.blocks[0].up
    up.forward = lambda x: F.linear(x, up.weight)  # type: ignore[method-assign]
    return model


class Forgetful(Home):
    """Its state leaves out the final norm, so that a fresh one takes its place."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop("norm.weight", None)
        return state


@bug("tensors-used", also=("export",))
def a_norm_that_is_not_saved() -> tuple[Home, dict[str, Any]]:
    model = Forgetful()
    return model, offers(model) | {"make": Forgetful}


# --------------------------------------------------------------------------------------------------------- export


class Tempered(Home):
    """A learned temperature in a plain attribute, which no state holds."""

    temperature = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, state = super().forward(*args, **kwargs)
        return logits / self.temperature, state


@bug("export")
def a_number_that_no_state_holds() -> tuple[Home, dict[str, Any]]:
    model = Tempered()
    model.temperature = 1.01
    return model, offers(model) | {"make": Tempered}


@bug("export")
def a_matrix_transposed_on_one_way() -> tuple[Home, dict[str, Any]]:
    model = Home()

    def exported() -> Any:
        other = Home()
        other.load_state_dict(model.state_dict())
        other.blocks[1].attention.o.weight = nn.Parameter(other.blocks[1].attention.o.weight.T.clone())
        return lambda tokens: other(tokens)[0]

    return model, offers(model) | {"exported": exported}


# ---------------------------------------------------------------------------------------------------------- modes


@bug("eval-repeatable")
def noise_that_stays_on() -> Home:
    model = Home()
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x + 1e-3 * torch.rand_like(x))  # type: ignore[method-assign]
    return model


@bug("mode-restored")
def a_generation_that_ends_in_training_mode() -> tuple[Home, dict[str, Any]]:
    model = Home()

    def write(tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        out = Home.write(model, tokens, n, mask)
        model.train()
        return out

    model.write = write  # type: ignore[method-assign]
    return model, offers(model)


@bug("dropout-off", also=("eval-repeatable",))
def dropout_without_its_mode() -> Home:
    model = Home()
    for block in model.blocks:
        attention = block.attention
        attention.pattern = lambda scores: F.dropout(scores.softmax(-1), 0.1)
    return model


@bug("dropout-off", also=("eval-repeatable",))
def dropout_that_eval_misses() -> Home:
    """Modules in a plain list are no part of the model: eval() does not reach them."""
    model = Home()
    unseen = [nn.Dropout(0.1)]
    plain = model.norm.forward
    model.norm.forward = lambda x: unseen[0](plain(x))  # type: ignore[method-assign]
    return model


@bug("dropout-off", also=("eval-repeatable",))
def a_mask_drawn_by_hand() -> Home:
    model = Home()
    plain = model.norm.forward
    model.norm.forward = lambda x: plain(x) * torch.bernoulli(torch.full_like(x, 0.9))  # type: ignore[method-assign]
    return model


class Direct(nn.Module):
    """Calls the forward of what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner.forward(*args)


@bug("hooks", also=("cache-poison",))
def forward_called_by_name() -> Home:
    model = Home()
    model.blocks[1] = Direct(model.blocks[1])
    return model


@bug("hooks")
def another_path_where_a_hook_is() -> Home:
    model = Home()
    norm = model.norm
    plain = norm.forward
    norm.forward = lambda x: plain(x) * (1.001 if norm._forward_hooks else 1.0)  # type: ignore[method-assign]
    return model
