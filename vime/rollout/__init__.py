"""Prompt -> scored group: prompts, generation through the router, rewards, filters, conversion to training rows.

Runs in the RolloutManager. Layer 5: knows the router's address and nothing of Ray, vLLM or the trainer.
"""
