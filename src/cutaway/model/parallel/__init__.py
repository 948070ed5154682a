"""Models on several devices: tensor parallelism over processes, and CPU offload of weights."""
