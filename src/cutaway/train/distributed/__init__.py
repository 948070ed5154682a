"""Distributed training: process groups, device meshes, DDP, FSDP2 and tensor parallelism."""
