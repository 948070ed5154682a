"""Files in the layouts of SAELens, sparsify and Gemma Scope: the features equal the closed formulas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.lens.sae import SAEConfig, SparseAutoencoder, load_sae, save_sae
from cutaway.lens.sae.files import hook_name_to_site, site_to_hook_name

D_IN, D_SAE, K = 6, 20, 3


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = randn(2, 5, D_IN, seed=0)
W_ENC, B_ENC, W_DEC, B_DEC = (
    randn(D_IN, D_SAE, seed=1),
    randn(D_SAE, seed=2),
    randn(D_SAE, D_IN, seed=3),
    randn(D_IN, seed=4),
)
THRESHOLD = randn(D_SAE, seed=5).abs()
WEIGHTS = {"W_enc": W_ENC, "b_enc": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}


def write_saelens(directory: Path, weights: dict[str, Tensor], **cfg: Any) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "sae_weights.safetensors")
    (directory / "cfg.json").write_text(json.dumps({"d_in": D_IN, "d_sae": D_SAE, "dtype": "float32"} | cfg))
    return directory


def keep_top_k(pre: Tensor) -> Tensor:
    kth = pre.sort(descending=True).values[..., K - 1 : K]
    return torch.where(pre >= kth, pre, 0.0).clamp(min=0)


def assert_features(directory: Path, expected: Tensor, decoder: Tensor = W_DEC) -> SparseAutoencoder:
    sae = load_sae(directory)
    torch.testing.assert_close(sae.encode(X), expected)
    torch.testing.assert_close(sae(X), expected @ decoder + B_DEC)
    return sae


def test_saelens_standard(tmp_path: Path) -> None:
    metadata = {"hook_name": "blocks.8.hook_resid_pre", "model_name": "gpt2"}
    directory = write_saelens(tmp_path, WEIGHTS, architecture="standard", apply_b_dec_to_input=True, metadata=metadata)
    sae = assert_features(directory, ((X - B_DEC) @ W_ENC + B_ENC).relu())
    assert sae.cfg.site == "blocks.8.resid_pre"
    write_saelens(
        tmp_path, WEIGHTS, architecture="standard", apply_b_dec_to_input=False, hook_name="blocks.1.hook_mlp_out"
    )
    sae = assert_features(directory, (X @ W_ENC + B_ENC).relu())
    assert sae.cfg.site == "blocks.1.ffn.out"


def test_saelens_topk(tmp_path: Path) -> None:
    expected = keep_top_k((X - B_DEC) @ W_ENC + B_ENC)
    assert_features(write_saelens(tmp_path, WEIGHTS, architecture="topk", k=K), expected)
    old = {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}}
    assert_features(write_saelens(tmp_path, WEIGHTS, **old), expected)
    # The features are scaled by the norms of the decoder directions before top-k, and divided by them in the decoder.
    norm = W_DEC.norm(dim=1)
    directory = write_saelens(tmp_path, WEIGHTS, architecture="topk", k=K, rescale_acts_by_decoder_norm=True)
    assert_features(directory, keep_top_k(((X - B_DEC) @ W_ENC + B_ENC) * norm), W_DEC / norm[:, None])


def test_saelens_jumprelu(tmp_path: Path) -> None:
    weights = WEIGHTS | {"threshold": THRESHOLD}
    directory = write_saelens(tmp_path, weights, architecture="jumprelu", apply_b_dec_to_input=False)
    pre = X @ W_ENC + B_ENC
    assert_features(directory, pre * (pre > THRESHOLD))


def test_saelens_gated(tmp_path: Path) -> None:
    b_gate, b_mag, r_mag = (randn(D_SAE, seed=seed) for seed in (6, 7, 8))
    weights = {"W_enc": W_ENC, "W_dec": W_DEC, "b_dec": B_DEC, "b_gate": b_gate, "b_mag": b_mag, "r_mag": r_mag}
    x = X - B_DEC
    gate = (x @ W_ENC + b_gate > 0).float()
    expected = gate * (x @ (W_ENC * r_mag.exp()) + b_mag).relu()
    assert_features(write_saelens(tmp_path, weights, architecture="gated"), expected)


def test_sparsify(tmp_path: Path) -> None:
    weights = {"encoder.weight": W_ENC.T.contiguous(), "encoder.bias": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}
    save_file(weights, tmp_path / "sae.safetensors")
    cfg = {"expansion_factor": 32, "normalize_decoder": True, "num_latents": 0, "k": K, "multi_topk": False}
    (tmp_path / "cfg.json").write_text(json.dumps(cfg | {"skip_connection": False, "d_in": D_IN}))
    assert_features(tmp_path, keep_top_k((X - B_DEC) @ W_ENC + B_ENC))
    assert load_sae(tmp_path, site="blocks.3.resid_post").cfg.site == "blocks.3.resid_post"
    (tmp_path / "cfg.json").write_text(json.dumps(cfg | {"transcode": True, "d_in": D_IN}))
    with pytest.raises(InputError, match="is a transcoder"):
        load_sae(tmp_path)


def test_gemma_scope(tmp_path: Path) -> None:
    arrays = {name: value.numpy() for name, value in (WEIGHTS | {"threshold": THRESHOLD}).items()}
    np.savez(tmp_path / "params.npz", **arrays)
    pre = X @ W_ENC + B_ENC
    assert_features(tmp_path, pre * (pre > THRESHOLD))
    assert_features(tmp_path / "params.npz", pre * (pre > THRESHOLD))


def test_pickled_arrays_are_rejected(tmp_path: Path) -> None:
    np.savez(tmp_path / "params.npz", W_enc=np.array([{"an": "object"}], dtype=object))
    with pytest.raises(InputError, match="without pickled objects"):
        load_sae(tmp_path)


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu", "gated"])
def test_saved_autoencoder_is_loaded_bit_for_bit(tmp_path: Path, architecture: Any) -> None:
    cfg = SAEConfig(architecture, D_IN, D_SAE, K if architecture == "topk" else None, site="blocks.2.attn.z")
    sae = SparseAutoencoder(cfg, seed=0)
    save_sae(sae, tmp_path)
    loaded = load_sae(tmp_path)
    assert loaded.cfg == cfg
    assert torch.equal(loaded(X), sae(X))
    assert load_file(tmp_path / "sae_weights.safetensors").keys() == sae.state_dict().keys()
    assert json.loads((tmp_path / "cfg.json").read_text())["metadata"]["hook_name"] == "blocks.2.attn.hook_z"


def test_hook_names_are_reversible() -> None:
    for suffix in ("resid_pre", "resid_mid", "resid_post", "attn.out", "ffn.out", "attn.z", "ffn.hidden"):
        site = f"blocks.11.{suffix}"
        assert hook_name_to_site(site_to_hook_name(site)) == site
    assert hook_name_to_site("blocks.3.hook_unknown") is None


def test_invalid_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of sae_weights\.safetensors"):
        load_sae(tmp_path)
    with pytest.raises(InputError, match="normalize_activations"):
        load_sae(write_saelens(tmp_path, WEIGHTS, architecture="standard", normalize_activations="layer_norm"))
    with pytest.raises(InputError, match="architecture is 'other'"):
        load_sae(write_saelens(tmp_path, WEIGHTS, architecture="other"))
    with pytest.raises(WeightError, match="has no threshold"):
        load_sae(write_saelens(tmp_path, WEIGHTS, architecture="jumprelu"))
    with pytest.raises(WeightError, match="b_dec of shape"):
        load_sae(write_saelens(tmp_path, WEIGHTS | {"b_dec": B_ENC.clone()}, architecture="standard"))
