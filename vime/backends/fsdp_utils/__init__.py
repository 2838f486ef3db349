"""The second trainer: torch's FSDP2 on any Hugging Face causal language model, on GPUs (NCCL) or without one (gloo).

Only trainer processes import this package. `backend.FsdpBackend` is the entry point; nothing else is called from
outside.
"""
