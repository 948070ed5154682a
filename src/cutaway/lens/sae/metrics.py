"""`evaluate_sae`: reconstruction, sparsity, and the loss of the model with reconstructed activations."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.lens.activations.batches import Corpus, TokenBatch, iterate_batches
from cutaway.lens.adapters import ModelLike, unwrap_model
from cutaway.lens.edit import edit
from cutaway.lens.sae.attach import attach_sae
from cutaway.lens.sae.autoencoder import SparseAutoencoder
from cutaway.lens.trace import trace


@dataclass(frozen=True)
class SAEMetrics:
    """Metrics of a sparse autoencoder on held-out text."""

    num_tokens: int
    explained_variance: float
    """1 − Σ‖x − x̂‖² / Σ‖x − mean‖²."""
    l0: float
    """Mean number of active features of a token."""
    dead_fraction: float
    """Fraction of the features that no token activates."""
    loss: float
    """Mean cross-entropy of the next token, in nats."""
    loss_reconstructed: float
    """Loss with the reconstruction instead of the activation."""
    loss_zero_ablated: float
    """Loss with zero instead of the activation."""

    @property
    def loss_recovered(self) -> float:
        """(zero-ablated − reconstructed loss) / (zero-ablated − loss): 1 means that the loss is unchanged."""
        return (self.loss_zero_ablated - self.loss_reconstructed) / (self.loss_zero_ablated - self.loss)

    def __str__(self) -> str:
        return (
            f"explained variance {self.explained_variance:.3f}, L0 {self.l0:.1f}, dead {self.dead_fraction:.1%}, "
            f"loss {self.loss:.3f}, reconstructed {self.loss_reconstructed:.3f}, "
            f"zero-ablated {self.loss_zero_ablated:.3f}, recovered {self.loss_recovered:.3f} "
            f"({self.num_tokens:,} tokens)"
        )


@torch.no_grad()
def evaluate_sae(
    model: ModelLike, sae: SparseAutoencoder, corpus: Corpus, *, seq_len: int = 256, batch_size: int = 16
) -> SAEMetrics:
    """Return the metrics of an autoencoder on a corpus of texts or token id sequences that it was not trained on.

    The model is a decoder: the losses are those of next-token prediction, over all tokens but the first of each row.
    """
    module, site = unwrap_model(model), sae.cfg.site
    if site is None:
        raise InputError("the autoencoder has no site in its configuration; load it with load_sae(path, site=…)")
    count, num_targets, sums = 0, 0, torch.zeros(3, dtype=torch.float64)
    squared_error, squared_norm, active_count = 0.0, 0.0, 0.0
    total, active = torch.zeros(sae.cfg.d_in, dtype=torch.float64), torch.zeros(sae.cfg.d_sae, dtype=torch.bool)
    with eval_mode(module):
        for batch in _iterate_rows(model, corpus, seq_len, batch_size):
            with attach_sae(module, sae), trace(module, "sae.acts", "sae.error", site) as t:
                loss, targets = _next_token_loss(module, batch)
            values = (t[name].as_subclass(Tensor).flatten(2).cpu() for name in ("sae.acts", "sae.error", site))
            acts, error, x = (value[batch.real] for value in values)
            count, num_targets = count + len(x), num_targets + targets
            squared_error += float(error.double().square().sum())
            squared_norm += float(x.double().square().sum())
            total += x.double().sum(0)
            active_count += float((acts > 0).sum())
            active |= (acts > 0).any(0)
            contexts: Sequence[AbstractContextManager[object]] = (
                attach_sae(module, sae, include_error=False),
                edit(module, {site: "zero"}),
            )
            losses = [loss]
            for context in contexts:
                with context:
                    losses.append(_next_token_loss(module, batch)[0])
            sums += torch.tensor(losses, dtype=torch.float64)
    if not num_targets:
        raise InputError("the corpus has no sequence of two or more tokens; pass longer sequences")
    variance = squared_norm - float(total.square().sum()) / count
    loss, reconstructed, ablated = (sums / num_targets).tolist()
    dead = 1 - float(active.float().mean())
    return SAEMetrics(count, 1 - squared_error / variance, active_count / count, dead, loss, reconstructed, ablated)


def _iterate_rows(model: ModelLike, corpus: Corpus, seq_len: int, batch_size: int) -> Iterator[TokenBatch]:
    tokenizer = getattr(model, "tokenizer", None)
    return iterate_batches(corpus, tokenizer, seq_len=seq_len, batch_size=batch_size, packing=False)


def _next_token_loss(model: nn.Module, batch: TokenBatch) -> tuple[float, int]:
    """Return the sum of the cross-entropies of the next tokens, and their number."""
    device = next(model.parameters()).device
    tokens, real = batch.tokens.to(device), batch.real.to(device)
    # Padding is on the right, so a causal model needs no mask.
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    targets = torch.where(real, tokens, -100)[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
    return float(loss), int((targets != -100).sum())
