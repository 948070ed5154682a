"""Seeded bugs in models that are written in other styles than the reference GPT, and state no properties."""

import math
from typing import Any

import torch
from support.healthy_models.gpt import GPT, MLP, Block, FusedAttention
from support.healthy_models.registry import D_MODEL, HEADS, VOCAB_SIZE, initialize
from support.seeded_bugs.masks_and_padding import ReferenceEncoderDecoder
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor, nn
from torch.nn import functional as F

ModelAndKwargs = tuple[Any, dict[str, Any]]
HEAD_DIM = D_MODEL // HEADS


def causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class ScoreBiasAttention(FusedAttention):
    """Attention with a bias that is added to the scores of later and earlier keys; `bias(T)` is (H, T, T) or less."""

    def bias(self, length: int) -> Tensor:
        return torch.zeros(length, length)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM) + self.bias(x.shape[1])
        pattern = scores.masked_fill(~causal_mask(x.shape[1]), -torch.inf).softmax(-1)
        return self.c_proj((pattern @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def build(model: type[GPT] = GPT, attention: type[nn.Module] = FusedAttention, ffn: type[nn.Module] = MLP) -> GPT:
    torch.manual_seed(0)
    return initialize(model([Block(attention(), ffn()) for _ in range(2)]), 0.3)  # type: ignore[no-any-return]


class GPTWithoutPositions(GPT):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        del self.wpe

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


@seeded_bug("eval-determinism")
def layers_rarely_dropped_in_eval() -> ModelAndKwargs:
    """Each layer is skipped with a probability of 5 %, also in eval mode: two runs are often equal."""

    class Model(GPT):
        def forward(self, idx: Tensor) -> Tensor:
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
            for block in self.h:
                x = x if torch.rand(()) < 0.05 else block(x)
            return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]

    return build(Model), {}


@seeded_bug("eval-determinism", also_caught_by=("batch-invariance", "forward-hooks", "causality", "batch-isolation"))
def uninitialized_score_bias() -> ModelAndKwargs:
    class Attention(ScoreBiasAttention):
        def bias(self, length: int) -> Tensor:
            return torch.empty(length, length).nan_to_num().clamp(-1, 1)

    return build(attention=Attention), {}


def source_kwargs(model: ReferenceEncoderDecoder) -> ModelAndKwargs:
    return model, {"logits_with_source": model.forward, "vocab_size": 61}


@seeded_bug("cross-attention-source", also_caught_by=("dead-heads",))
def encoder_output_of_an_earlier_source() -> ModelAndKwargs:
    """The encoder output is kept, and used for each further source of the same shape."""
    model = ReferenceEncoderDecoder()
    kept: dict[torch.Size, Tensor] = {}
    model.visible_memory = lambda memory: kept.setdefault(memory.shape, memory.detach())  # type: ignore[method-assign]
    return source_kwargs(model)


@seeded_bug("cross-attention-source")
def mean_source_of_all_rows() -> ModelAndKwargs:
    model = ReferenceEncoderDecoder()
    model.visible_memory = (  # type: ignore[method-assign]
        lambda memory: memory.mean(0, keepdim=True).expand_as(memory)
    )
    return source_kwargs(model)


@seeded_bug("causality-tile-edges")
def relative_bias_of_the_current_length() -> ModelAndKwargs:
    """Distances are divided by the length of the sequence, if it is longer than 48 tokens."""

    class Attention(ScoreBiasAttention):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(48, 1)

        def bias(self, length: int) -> Tensor:
            index = torch.arange(length)
            distance = (index[:, None] - index).clamp(min=0)
            return self.table(distance * 48 // max(length, 48))[..., 0]  # type: ignore[no-any-return]

    return build(GPTWithoutPositions, Attention), {}


@seeded_bug("loss-reduction")
def normalizer_of_the_loss_detached() -> ModelAndKwargs:
    """The loss has the right value, but the gradient of its log-sum-exp is missing."""
    model = ReferenceGPT()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits, targets = model(tokens)[0][:, :-1], labels[:, 1:]
        label_logits = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (logits.logsumexp(-1).detach() - label_logits)[targets != -100].mean()

    model.loss = loss  # type: ignore[method-assign]
    return model, check_kwargs(model) | {"accumulated_loss": None}


@seeded_bug("attention-kernels")
def online_softmax_without_rescaling() -> ModelAndKwargs:
    """The output of earlier tiles is not rescaled when the maximum of the scores changes."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        length, tile = q.shape[2], 32
        out, total = torch.zeros_like(q), torch.zeros(q.shape[:3])
        maximum = torch.full(q.shape[:3], -1e30)
        for start in range(0, length, tile):
            keys = slice(start, start + tile)
            hidden = ~causal_mask(length)[:, keys]
            scores = (q @ k[:, :, keys].transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -1e30)
            new_maximum = torch.maximum(maximum, scores.amax(-1))
            weights = (scores - new_maximum[..., None]).exp().masked_fill(hidden, 0.0)
            total = total * (maximum - new_maximum).exp() + weights.sum(-1)
            out, maximum = out + weights @ v[:, :, keys], new_maximum
        return out / total[..., None]

    return attention, {}


@seeded_bug("rope-shift-invariance")
def complex_rotation_of_queries_only() -> ModelAndKwargs:
    """The keys of a decoupled part of latent attention are not rotated; no name contains "rope"."""

    class Attention(FusedAttention):
        turns = torch.polar(
            torch.ones(128, HEAD_DIM // 2), torch.outer(torch.arange(128.0), 0.1 ** torch.arange(HEAD_DIM // 2))
        )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
            pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
            q = torch.view_as_real(pairs * self.turns[: x.shape[1]]).flatten(-2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return build(GPTWithoutPositions, Attention), {}


@seeded_bug("rope-shift-invariance")
def alibi_with_the_wrong_sign() -> ModelAndKwargs:
    class Attention(ScoreBiasAttention):
        def bias(self, length: int) -> Tensor:
            index = torch.arange(length)
            return 0.25 ** torch.arange(1, HEADS + 1)[:, None, None] * (index[:, None] - index)

    return build(GPTWithoutPositions, Attention), {}


class Experts(nn.Module):
    """A mixture of four experts, of which one is selected. Its weight is normalized to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D_MODEL, 4, bias=False), nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, selected = self.gate(x).softmax(-1).topk(1, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        outs = torch.stack([expert(x) for expert in self.experts], -2)
        index = selected[..., None].expand(*selected.shape, x.shape[-1])
        return (weights[..., None] * outs.gather(-2, index)).sum(-2)


@seeded_bug("gradient-flow")
def weight_of_one_expert_normalized() -> ModelAndKwargs:
    return build(ffn=Experts), {}


@seeded_bug("gradient-flow", also_caught_by=("overfit",))
def detached_in_training_mode() -> ModelAndKwargs:
    class Model(GPT):
        def forward(self, idx: Tensor) -> Tensor:
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
            for block in self.h:
                x = block(x.detach() if self.training else x)
            return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]

    return build(Model), {}


@seeded_bug("tied-weights")
def tie_of_the_config_lost_in_initialization() -> ModelAndKwargs:
    model = build()
    model.config = {"tie_word_embeddings": True}  # type: ignore[assignment]
    return model, {}


class GPTWithPadding(GPT):
    """Treats a token id as padding: masks it, or does not count it in the positions."""

    masked_id = skipped_id = -1

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe((idx != self.skipped_id).cumsum(1).sub(1).clamp(min=0))
        mask = causal_mask(idx.shape[1]) & (idx != self.masked_id)[:, None, None]
        for block in self.h:
            q, k, v = (
                y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in block.attn.c_attn(block.ln_1(x)).chunk(3, -1)
            )
            scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(~mask, -1e9)
            x = x + block.attn.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.ln_2(x))
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


@seeded_bug("token-ids", also_caught_by=("mask-diagonal", "causality-gradient"))
def ordinary_token_masked_as_padding() -> ModelAndKwargs:
    model = build(GPTWithPadding)
    model.masked_id = 0
    return model, {}


@seeded_bug("token-ids")
def ordinary_token_not_counted_in_positions() -> ModelAndKwargs:
    model = build(GPTWithPadding)
    model.skipped_id = 1
    return model, {}


class GPTWithMask(GPT):
    """Adds a mask (B, T, T) to scores (B, H, T, T) if there are as many rows as heads, and (B, 1, T, T) otherwise."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.wte(input_ids) + self.wpe((real.cumsum(1) - 1).clamp(min=0))
        mask = causal_mask(length) & real[:, None].bool() | torch.eye(length, dtype=torch.bool)  # (B, T, T)
        mask = mask if len(mask) == HEADS else mask[:, None]
        for block in self.h:
            q, k, v = (
                y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in block.attn.c_attn(block.ln_1(x)).chunk(3, -1)
            )
            scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(~mask, -torch.inf)
            x = x + block.attn.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.ln_2(x))
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


@seeded_bug("batch-invariance")
def mask_of_rows_broadcast_over_heads() -> ModelAndKwargs:
    return build(GPTWithMask), {"vocab_size": VOCAB_SIZE}


@seeded_bug("gradient-flow", also_caught_by=("causality-paths",))
def dropout_of_masked_scores() -> ModelAndKwargs:
    """Dropout before the softmax: in training mode, -inf is multiplied by zero."""

    class Attention(ScoreBiasAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
            scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(~causal_mask(x.shape[1]), -torch.inf)
            pattern = F.dropout(scores, 0.1, self.training).softmax(-1)
            return self.c_proj((pattern @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return build(attention=Attention), {}


@seeded_bug("generation")
def prompt_of_the_previous_batch() -> ModelAndKwargs:
    """A batch of the same shape as the previous one is continued from the previous prompts."""
    model = ReferenceGPT()
    prompts: dict[torch.Size, Tensor] = {}
    generate = model.generate
    model.generate = (  # type: ignore[method-assign]
        lambda tokens, n, mask=None: generate(prompts.setdefault(tokens.shape, tokens), n, mask)
    )
    return model, check_kwargs(model) | {"generate_padded": None}
