"""`SparseAutoencoder`: features of an activation, f = act(W_enc·x + b_enc), and the reconstruction W_dec·f + b_dec.

Parameters have the names and shapes of SAELens: W_enc (d_in, d_sae), b_enc (d_sae,), W_dec (d_sae, d_in), b_dec
(d_in,).
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from cutaway.argument_checks import check_dtype, check_positive_int
from cutaway.errors import InputError

Architecture = Literal["standard", "topk", "jumprelu", "gated"]


@dataclass(frozen=True)
class SAEConfig:
    """Configuration of a sparse autoencoder, with the keys of cfg.json in SAELens.

    standard: ReLU (Bricken et al. 2023). topk: ReLU of the `k` largest pre-activations of a token (Gao et al. 2024).
    jumprelu: pre-activations above a threshold per feature. gated: ReLU with a separate gate that decides which
    features are active (both Rajamanoharan et al. 2024).
    """

    architecture: Architecture
    d_in: int
    d_sae: int
    k: int | None = None
    apply_b_dec_to_input: bool = True
    """Whether b_dec is subtracted from the input."""
    site: str | None = None
    """Site whose activations are encoded, such as "blocks.2.resid_post"."""

    def __post_init__(self) -> None:
        if self.architecture not in get_args(Architecture):
            raise InputError(f"architecture is {self.architecture!r}; use one of {', '.join(get_args(Architecture))}")
        check_positive_int("d_in", self.d_in)
        check_positive_int("d_sae", self.d_sae)
        if (self.k is not None) != (self.architecture == "topk"):
            raise InputError(
                f"k is {self.k!r}, but the architecture is {self.architecture}; topk needs k, others have none"
            )
        if self.k is not None:
            check_positive_int("k", self.k)
            if self.k > self.d_sae:
                raise InputError(f"k is {self.k}, but there are {self.d_sae} features; pass k ≤ d_sae")


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder. `encode` returns the feature activations, `decode` the reconstruction.

    New weights are random: unit decoder directions, and the encoder is the decoder transposed. The dtype is fp32 by
    default, also if the model's dtype is lower: inputs are converted.
    """

    def __init__(
        self, cfg: SAEConfig, *, seed: int | None = None, dtype: torch.dtype = torch.float32, device: str | None = None
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        self.cfg = cfg
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        directions = torch.randn(cfg.d_sae, cfg.d_in, generator=generator)
        directions = (directions / directions.norm(dim=1, keepdim=True)).to(device, dtype)
        self.W_dec = nn.Parameter(directions)
        self.W_enc = nn.Parameter(directions.T.contiguous().clone())
        self.b_dec = nn.Parameter(torch.zeros_like(directions[0]))
        zeros = torch.zeros_like(directions[:, 0])
        if cfg.architecture == "gated":
            self.b_gate, self.b_mag, self.r_mag = (nn.Parameter(zeros.clone()) for _ in range(3))
        else:
            self.b_enc = nn.Parameter(zeros)
        if cfg.architecture == "jumprelu":
            self.threshold = nn.Parameter(torch.zeros_like(zeros))

    def pre_activations(self, x: Tensor) -> Tensor:
        """Return the input of the activation function, (…, d_in) → (…, d_sae). For gated, that of the gate."""
        x = x.to(self.W_enc.dtype)
        if x.shape[-1] != self.cfg.d_in:
            raise InputError(f"the activation has width {x.shape[-1]}, but the autoencoder has d_in = {self.cfg.d_in}")
        x = x - self.b_dec if self.cfg.apply_b_dec_to_input else x
        return x @ self.W_enc + (self.b_gate if self.cfg.architecture == "gated" else self.b_enc)

    def encode(self, x: Tensor) -> Tensor:
        """Return the activations of the features, (…, d_in) → (…, d_sae)."""
        pre = self.pre_activations(x)
        if self.cfg.architecture == "topk":
            assert self.cfg.k is not None
            return top_k_activation(pre, self.cfg.k)
        if self.cfg.architecture == "jumprelu":
            return torch.where(pre > self.threshold, pre, 0.0).relu()
        if self.cfg.architecture == "gated":
            # The magnitude has the direction of the gate, scaled by exp(r_mag) per feature, and its own bias.
            magnitude = (pre - self.b_gate) * self.r_mag.exp() + self.b_mag
            return torch.where(pre > 0, magnitude.relu(), 0.0)
        return pre.relu()

    def decode(self, acts: Tensor) -> Tensor:
        """Return the reconstruction, (…, d_sae) → (…, d_in)."""
        return acts @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction of an activation."""
        return self.decode(self.encode(x))

    def extra_repr(self) -> str:
        k = "" if self.cfg.k is None else f", k={self.cfg.k}"
        return f"{self.cfg.architecture}, d_in={self.cfg.d_in}, d_sae={self.cfg.d_sae}{k}, site={self.cfg.site}"


def top_k_activation(pre: Tensor, k: int) -> Tensor:
    """Return ReLU of the `k` largest values of the last axis, and 0 elsewhere."""
    values, indices = pre.topk(k, dim=-1)
    return torch.zeros_like(pre).scatter(-1, indices, values.relu())
