"""The trainer: megatron-core on GPUs (NCCL) or on a machine without one (gloo and `cpu_device`).

Only trainer processes import this room. `trainer.MegatronTrainer` is the door; nothing else is called from outside,
except `initialize.RankInfo`, which says who a process is.
"""
