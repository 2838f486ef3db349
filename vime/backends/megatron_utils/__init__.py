"""Training on megatron-core: on GPUs (NCCL) or on a machine without one (gloo and `cpu_device`).

Only trainer processes import this package. `backend.MegatronBackend` is the entry point; the engines it builds play the
roles.
"""
