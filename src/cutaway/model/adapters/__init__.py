"""Adapters: LoRA layers, quantized base layers, and the methods of a model that concern its adapters."""
