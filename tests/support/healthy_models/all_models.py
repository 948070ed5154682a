"""Imports every module of correct models, which registers them."""

from importlib import import_module

MODULE_NAMES = ("torch_layers", "gpt", "llama", "biases_and_mixers", "attention_variants", "hf_style", "other_designs")
MODEL_MODULES = [import_module(f"support.healthy_models.{name}") for name in MODULE_NAMES]
