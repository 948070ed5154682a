"""Tensor parallelism for inference: each rank has a part of the heads, hidden units, experts and of the vocabulary.

    column parallel (q, k, v, gate, up):  y_r = x·W_rᵀ
    row parallel (o, down):               y = Σ_r x_r·W_rᵀ
    experts:                              y = Σ_r Σ_{e on rank r} p_e·E_e(x)
    vocabulary parallel embedding:        x = Σ_r E_r[token], 0 where the token is on another rank

The index r is the rank (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053). A sharded module is a subclass of the
module that it replaces.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.model.attention import LatentAttention, MultiHead, QueryKeyNorm
from cutaway.model.embedding import Embedding
from cutaway.model.ffn import MLP, GatedMLP
from cutaway.model.head import LMHead
from cutaway.model.layers import EmbeddingTable
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.parallel.process_group import TensorParallel
from cutaway.model.positions import Disentangled, RelativeBias, ScoreBias
from cutaway.model.transformer import Transformer


@dataclass(frozen=True)
class TensorSlice:
    """The part of a full tensor that a rank holds: indices start … start + length − 1 of dimension `dim`."""

    dim: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.start, self.length)


class _Sharded:
    """Mixin for a module that takes part in collectives."""

    ranks: TensorParallel


class RowParallelLinear(_Sharded, nn.Linear):
    """Linear layer with a part of the input. The bias is added after the sum over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.ranks.all_reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(_Sharded, EmbeddingTable):
    """Embedding of a part of the vocabulary. If weights are tied, it is the output matrix too."""

    first_token: int

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d"]:
        index = tokens - self.first_token
        is_remote = (index < 0) | (index >= len(self.weight))
        x = F.embedding(index.masked_fill(is_remote, 0), self.weight).masked_fill(is_remote.unsqueeze(-1), 0)
        return self.ranks.all_reduce(x)


class VocabParallelHead(_Sharded, LMHead):
    """LM head with a part of the output matrix. The logits of all ranks are gathered."""

    vocab_size: int

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch V"]:
        logits = super().forward(x)
        size, longest = self.ranks.size, -(-self.vocab_size // self.ranks.size)
        logits = self.ranks.all_gather(F.pad(logits, (0, longest - logits.shape[-1])), -1)
        if self.vocab_size % size == 0:
            return logits
        parts = torch.split(logits, longest, -1)  # parts that are one token shorter are padded
        bounds = [self.vocab_size * rank // size for rank in range(size + 1)]
        return torch.cat([part[..., : bounds[i + 1] - bounds[i]] for i, part in enumerate(parts)], -1)


class ExpertParallelMoE(_Sharded, MixtureOfExperts):
    """Mixture with a part of the experts. Every rank routes all tokens; the outputs are summed over the ranks."""

    first_expert: int

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.ranks.all_reduce(super().forward(x))  # the shared expert's output is partial, too

    def apply_experts(
        self, x: Float[Tensor, "n d"], weights: Float[Tensor, "n k"], selected: Int[Tensor, "n k"]
    ) -> Float[Tensor, "n d"]:
        expert = (selected - self.first_expert).flatten()  # (n·k,): one entry per token and selected expert
        entries = ((expert >= 0) & (expert < self.num_experts)).nonzero().squeeze(-1)
        sorted_experts, order = expert[entries].sort(stable=True)
        entries = entries[order]
        y = x.new_zeros(len(expert), x.shape[-1])
        if len(entries):
            offsets = torch.searchsorted(sorted_experts, torch.arange(self.num_experts, device=x.device), right=True)
            y[entries] = self.experts(x[entries // selected.shape[-1]], offsets)
        return torch.einsum("nk,nkd->nd", weights.to(y.dtype), y.view(*selected.shape, -1))


class GatheredQueryKeyNorm(_Sharded, QueryKeyNorm):
    """QK-norm over all heads: its statistics need the heads of all ranks."""

    first_head: int
    replicas: int
    """Number of ranks that have the same head."""

    def forward(self, x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        heads = x.shape[-2]
        parts = torch.split(self.ranks.all_gather(x, -2), heads, -2)[:: self.replicas]
        return super().forward(torch.cat(parts, -2)).narrow(-2, self.first_head, heads)


class ShardedScoreBias(ScoreBias):
    """Mixin for the attention score bias of this rank's heads, which start at `first_head`."""

    first_head: int
    num_heads: int

    def dense_bias(self, q: Tensor, k: Tensor) -> Tensor:
        if isinstance(self, RelativeBias):
            return super().dense_bias(q, k)[:, self.first_head : self.first_head + self.num_heads]
        head = torch.arange(self.num_heads, device=q.device)[:, None, None]
        return self.elementwise_bias(q[:, None, :, None], k[:, None, None, :], head).expand(-1, -1, q.shape[-1], -1)

    def elementwise_bias(self, q: Tensor, k: Tensor, head: Tensor) -> Tensor:
        return super().elementwise_bias(q, k, head + self.first_head)


def apply_tensor_parallel(model: Transformer, ranks: TensorParallel) -> dict[str, TensorSlice]:
    """Change the modules of a model on the meta device to those of this rank. Return the slices by state dict key.

    The parameters keep their full shapes, until loading replaces them by this rank's slices."""
    sharding = _Sharding(ranks)
    for module in list(model.modules()):
        if isinstance(module, Disentangled):
            raise _unsupported("disentangled attention")
        if isinstance(module, MultiHead):
            sharding.shard_attention(module)
        elif isinstance(module, LatentAttention):
            sharding.shard_latent_attention(module)
        elif isinstance(module, MixtureOfExperts):
            sharding.shard_experts(module)
        elif isinstance(module, MLP | GatedMLP):
            sharding.shard_ffn(module)
        elif isinstance(module, ScoreBias):
            heads = sharding.split_heads("heads", module.heads)
            mixin = type("Sharded" + type(module).__name__, (ShardedScoreBias, type(module)), {})
            _swap_class(module, mixin, first_head=heads.start, num_heads=len(heads))
        elif isinstance(module, Embedding):
            sharding.shard_embedding(module.token)
    if isinstance(model.head, LMHead):
        sharding.shard_head(model.head, model.config.vocab_size)
    model.tensor_parallel = ranks
    state = model.state_dict(keep_vars=True)
    return {name: sharding.slices[id(tensor)] for name, tensor in state.items() if id(tensor) in sharding.slices}


class _Sharding:
    """Slices of the parameters that have been sharded so far, by the id of the full parameter."""

    def __init__(self, ranks: TensorParallel) -> None:
        self.ranks = ranks
        self.slices: dict[int, TensorSlice] = {}
        self.shared_experts: set[nn.Module] = set()
        """FFNs whose output is summed over the ranks by the mixture that they belong to."""

    def shard_attention(self, module: MultiHead) -> None:
        heads, kv_heads = self.split_heads("query heads", module.heads), self._split_kv_heads(module.kv_heads)
        replicas = max(1, self.ranks.size // module.kv_heads)
        if module.position_q is not None or module.position_k is not None:
            raise _unsupported("disentangled attention")
        for matrix, part in ((module.q, heads), (module.k, kv_heads), (module.v, kv_heads)):
            self._column_parallel(matrix, _scale(part, module.d_head))
        self._row_parallel(module.o, _scale(heads, module.d_head))
        for norm, part, copies in ((module.q_norm, heads, 1), (module.k_norm, kv_heads, replicas)):
            if isinstance(norm, QueryKeyNorm) and norm.over_all_heads:
                _swap_class(norm, GatheredQueryKeyNorm, ranks=self.ranks, first_head=part.start, replicas=copies)
            elif isinstance(norm, QueryKeyNorm):
                for parameter in norm.norm.parameters(recurse=False):
                    if parameter.ndim > 1:  # a gain per head
                        self._slice(parameter, 0, part)
        if module.sink is not None:
            self._slice(module.sink, 0, heads)
        module.heads, module.kv_heads = len(heads), len(kv_heads)

    def shard_latent_attention(self, module: LatentAttention) -> None:
        heads = self.split_heads("heads", module.heads)
        q = module.q[-1] if isinstance(module.q, nn.Sequential) else module.q
        self._column_parallel(q, _scale(heads, module.d_nope + module.d_rope))
        self._column_parallel(module.kv_up, _scale(heads, module.d_nope + module.d_value))
        self._row_parallel(module.o, _scale(heads, module.d_value))
        module.heads = len(heads)

    def shard_ffn(self, module: MLP | GatedMLP) -> None:
        if module.down.weight.ndim > 2:  # type: ignore[operator]
            return  # experts, which are split by expert
        hidden = self.ranks.split(module.down.weight.shape[-1])  # type: ignore[index, arg-type]
        for matrix in (module.up, module.gate) if isinstance(module, GatedMLP) else (module.up,):
            self._column_parallel(matrix, hidden)
        if module in self.shared_experts:
            self._slice(module.down.weight, 1, hidden)  # type: ignore[arg-type]
        else:
            self._row_parallel(module.down, hidden)

    def shard_experts(self, module: MixtureOfExperts) -> None:
        if module.num_experts < self.ranks.size:
            raise InputError(
                f"{module.num_experts} experts cannot be split over {self.ranks.size} processes; start at most"
                f" {module.num_experts}"
            )
        experts = self.ranks.split(module.num_experts)
        for parameter in module.experts.parameters():
            self._slice(parameter, 0, experts)
        if module.shared is not None:
            if module.shared.down.bias is not None:  # type: ignore[union-attr]
                raise _unsupported("a shared expert with a bias")
            self.shared_experts.add(module.shared)
        module.num_experts = len(experts)
        _swap_class(module, ExpertParallelMoE, ranks=self.ranks, first_expert=experts.start)

    def shard_embedding(self, table: EmbeddingTable) -> None:
        if isinstance(table, VocabParallelEmbedding):
            return  # encoder and decoder share this table, and it is sharded already
        tokens = self.ranks.split(table.num_embeddings)
        self._slice(table.weight, 0, tokens)
        _swap_class(table, VocabParallelEmbedding, ranks=self.ranks, first_token=tokens.start)

    def shard_head(self, head: LMHead, vocab_size: int) -> None:
        tokens = self.ranks.split(vocab_size)
        self._slice(head.matrix.weight, 0, tokens)  # type: ignore[arg-type]
        if head.bias is not None:
            self._slice(head.bias, 0, tokens)
        _swap_class(head, VocabParallelHead, ranks=self.ranks, vocab_size=vocab_size)

    def split_heads(self, what: str, count: int) -> range:
        if count % self.ranks.size:
            divisors = [str(size) for size in range(2, count + 1) if count % size == 0]
            raise InputError(
                f"{count} {what} cannot be split over {self.ranks.size} processes; use a divisor of {count}:"
                f" {', '.join(divisors) or '1'}"
            )
        return self.ranks.split(count)

    def _split_kv_heads(self, count: int) -> range:
        """With fewer KV heads than ranks, several ranks have the same head."""
        if count >= self.ranks.size or self.ranks.size % count:
            return self.split_heads("KV heads", count)
        head = self.ranks.rank * count // self.ranks.size
        return range(head, head + 1)

    def _slice(self, parameter: Tensor, dim: int, part: range) -> None:
        self.slices[id(parameter)] = TensorSlice(dim, part.start, len(part))

    def _column_parallel(self, matrix: nn.Module, rows: range) -> None:
        for parameter in matrix.parameters():  # weight, and bias if there is one
            self._slice(parameter, 0, rows)

    def _row_parallel(self, matrix: nn.Module, columns: range) -> None:
        self._slice(matrix.weight, 1, columns)  # type: ignore[arg-type]
        _swap_class(matrix, RowParallelLinear, ranks=self.ranks)


def _scale(part: range, width: int) -> range:
    """Rows of the heads `part`, each of which has `width` rows."""
    return range(part.start * width, part.stop * width)


def _swap_class(module: nn.Module, new_class: type, **attributes: Any) -> None:
    module.__class__ = new_class
    for name, value in attributes.items():
        setattr(module, name, value)


def _unsupported(what: str) -> InputError:
    return InputError(f"tensor parallelism does not support {what}; load the model on one device")
