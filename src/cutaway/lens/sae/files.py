"""Files of sparse autoencoders: read the layouts of SAELens, sparsify and Gemma Scope, and write that of SAELens.

    SAELens      cfg.json, sae_weights.safetensors   W_enc, b_enc, W_dec, b_dec, threshold; b_gate, b_mag, r_mag
    sparsify     cfg.json, sae.safetensors           encoder.weight, encoder.bias, W_dec, b_dec
    Gemma Scope  params.npz                          W_enc, b_enc, W_dec, b_dec, threshold

No layout needs pickle: npz files are read with allow_pickle=False.
"""

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from cutaway.bounded_files import read_json_object
from cutaway.errors import InputError, WeightError
from cutaway.families.safetensors_reader import load_safetensors
from cutaway.lens.sae.autoencoder import Architecture, SAEConfig, SparseAutoencoder

CONFIG_FILE, SAELENS_FILE, SPARSIFY_FILE, GEMMA_SCOPE_FILE = (
    "cfg.json",
    "sae_weights.safetensors",
    "sae.safetensors",
    "params.npz",
)
_HOOK_NAMES = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn.out",
    "hook_mlp_out": "ffn.out",
    "attn.hook_z": "attn.z",
    "mlp.hook_post": "ffn.hidden",
}
"""Hook name of TransformerLens in a block → suffix of the site."""


def load_sae(
    path: str | Path, *, site: str | None = None, device: str | None = None, dtype: torch.dtype = torch.float32
) -> SparseAutoencoder:
    """Load a sparse autoencoder: a directory in the layout of SAELens, sparsify or Gemma Scope, or a .npz file.

    `site` is the site of its input. By default it is the hook name of the SAELens configuration; the other layouts do
    not store it.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".npz":
        cfg, tensors = _read_gemma_scope(path)
    elif (path / SAELENS_FILE).is_file():
        cfg, tensors = _read_saelens(path)
    elif (path / SPARSIFY_FILE).is_file():
        cfg, tensors = _read_sparsify(path)
    elif (path / GEMMA_SCOPE_FILE).is_file():
        cfg, tensors = _read_gemma_scope(path / GEMMA_SCOPE_FILE)
    else:
        files = ", ".join((SAELENS_FILE, SPARSIFY_FILE, GEMMA_SCOPE_FILE))
        raise InputError(f"'{path}' has none of {files}; pass the directory of a sparse autoencoder, or a .npz file")
    cfg = cfg if site is None else replace(cfg, site=site)
    return _build(cfg, tensors, path, device, dtype)


def save_sae(sae: SparseAutoencoder, directory: str | Path) -> None:
    """Write a sparse autoencoder in the layout of SAELens."""
    directory, cfg = Path(directory), sae.cfg
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in sae.state_dict().items()}, directory / SAELENS_FILE
    )
    data: dict[str, Any] = {
        "architecture": cfg.architecture,
        "d_in": cfg.d_in,
        "d_sae": cfg.d_sae,
        "dtype": str(sae.W_enc.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": cfg.apply_b_dec_to_input,
        "normalize_activations": "none",
        "reshape_activations": "hook_z" if cfg.site is not None and cfg.site.endswith(".attn.z") else "none",
        "metadata": {} if cfg.site is None else {"hook_name": site_to_hook_name(cfg.site), "site": cfg.site},
    }
    if cfg.k is not None:
        data["k"] = cfg.k
    (directory / CONFIG_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def hook_name_to_site(name: str) -> str | None:
    """Return the site of a hook name of TransformerLens, or None if there is none."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None:
        return {"hook_embed": "embed", "ln_final.hook_normalized": "final_norm"}.get(name)
    suffix = _HOOK_NAMES.get(match[2])
    return None if suffix is None else f"blocks.{match[1]}.{suffix}"


def site_to_hook_name(site: str) -> str:
    """Return the hook name of TransformerLens for a site, or the site itself if there is none."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", site)
    hooks = {suffix: hook for hook, suffix in _HOOK_NAMES.items()}
    return site if match is None or match[2] not in hooks else f"blocks.{match[1]}.{hooks[match[2]]}"


def _read_saelens(directory: Path) -> tuple[SAEConfig, dict[str, Tensor]]:
    path = directory / CONFIG_FILE
    data, tensors = read_json_object(path, InputError), _read_safetensors(directory / SAELENS_FILE)
    architecture, k = data.get("architecture", "standard"), data.get("k")
    # Before version 6, the activation function was a separate key.
    if data.get("activation_fn_str", data.get("activation_fn")) == "topk" or architecture == "topk":
        options = data.get("activation_fn_kwargs") or {}
        architecture, k = "topk", k if k is not None else options.get("k")
    if data.get("normalize_activations", "none") not in ("none", None, False):
        problem = f"'{path}' has normalize_activations = {data['normalize_activations']!r}"
        raise InputError(f"{problem}; only 'none' is supported, so fold the normalization into the weights")
    scaling = tensors.pop("scaling_factor", None)
    if scaling is not None and data.get("finetuning_scaling_factor"):
        tensors["W_dec"] = tensors["W_dec"] * scaling[:, None]
    if data.get("rescale_acts_by_decoder_norm"):
        # Features are scaled by the norms of their decoder directions, which is the same as unit directions.
        norm = tensors["W_dec"].norm(dim=1)
        tensors["W_enc"], tensors["W_dec"] = tensors["W_enc"] * norm, tensors["W_dec"] / norm[:, None]
        tensors["b_enc"] = tensors["b_enc"] * norm
    metadata = data.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    hook_name = metadata.get("hook_name", data.get("hook_name"))
    site = metadata.get("site") or (hook_name_to_site(hook_name) if isinstance(hook_name, str) else None)
    return _config(path, data, architecture, k, data.get("apply_b_dec_to_input", True), site), tensors


def _read_sparsify(directory: Path) -> tuple[SAEConfig, dict[str, Tensor]]:
    path = directory / CONFIG_FILE
    data, tensors = read_json_object(path, InputError), _read_safetensors(directory / SPARSIFY_FILE)
    if data.get("transcode") or data.get("skip_connection") or "W_skip" in tensors:
        raise InputError(f"'{path}' is a transcoder, whose output is another activation; pass an autoencoder")
    if data.get("activation", "topk") != "topk":
        raise InputError(f"'{path}' has activation = {data['activation']!r}; only 'topk' is supported")
    names = {"encoder.weight": "W_enc", "encoder.bias": "b_enc"}
    tensors = {names.get(name, name): value for name, value in tensors.items()}
    if "W_enc" in tensors:
        tensors["W_enc"] = tensors["W_enc"].T  # (d_sae, d_in) in nn.Linear
        data |= {"d_sae": tensors["W_enc"].shape[-1]}
    return _config(path, data, "topk", data.get("k"), True, None), tensors


def _read_gemma_scope(path: Path) -> tuple[SAEConfig, dict[str, Tensor]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, TypeError) as error:
        raise InputError(f"cannot read '{path}': {error}; pass a .npz file of arrays without pickled objects") from None
    d_in, d_sae = tensors["W_enc"].shape if "W_enc" in tensors and tensors["W_enc"].ndim == 2 else (0, 0)
    return _config(path, {"d_in": d_in, "d_sae": d_sae}, "jumprelu", None, False, None), tensors


def _config(
    path: Path, data: Mapping[str, Any], architecture: Architecture, k: int | None, apply_b_dec: bool, site: str | None
) -> SAEConfig:
    try:
        return SAEConfig(architecture, data["d_in"], data["d_sae"], k, apply_b_dec, site)
    except KeyError as error:
        raise InputError(f"'{path}' has no {error}; pass the configuration of a sparse autoencoder") from None
    except InputError as error:
        raise InputError(f"'{path}' is not valid: {error}") from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_safetensors(path)
    except WeightError as error:
        raise InputError(f"cannot read '{path}': {error}") from None


def _build(
    cfg: SAEConfig, tensors: dict[str, Tensor], path: Path, device: str | None, dtype: torch.dtype
) -> SparseAutoencoder:
    """Return an autoencoder with these weights. Raise unless their names and shapes follow from the configuration."""
    with torch.device("meta"):
        sae = SparseAutoencoder(cfg)
    expected = {name: tuple(value.shape) for name, value in sae.state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys()):
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != expected.get(name):
            problem = f"'{path}' has {name} of shape {shape}" if shape is not None else f"'{path}' has no {name}"
            raise WeightError(
                f"{problem}, but a {cfg.architecture} autoencoder has {expected.get(name)}; check the files"
            )
    state = {name: value.to(device=device or "cpu", dtype=dtype).contiguous() for name, value in tensors.items()}
    sae.load_state_dict(state, assign=True)
    return sae.eval()
