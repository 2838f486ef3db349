"""Rewards, filters and post-processing in the manner of slime, as its users write them."""

import torch
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.utils.types import Sample


async def of_label(args, sample, **kwargs):
    """A label that is an object, and the status that the answer ended with."""
    if not isinstance(sample, Sample):
        raise TypeError("expected a Sample")
    if sample.status == Sample.Status.TRUNCATED:
        return 0.0
    return float(sample.response.startswith(sample.label["target"]))


async def of_tool_use(args, sample, **kwargs):
    """A dict with text among its numbers, and an attribute that the generate function has set."""
    result = compute_score(f"Answer: {sample.response}", sample.label["target"])
    if result["score"] < 0:
        result["score"] += 0.1 * getattr(sample, "num_calls", 0)
    result["pred"] = result["pred"] or ""
    return result


async def of_group(args, samples, **kwargs):
    longest = max(sample.effective_response_length for sample in samples)
    return [1.0 - sample.effective_response_length / (2 * longest) for sample in samples]


def keep_spread(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float64).std() > 1e-6
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"no_spread_{rewards[0]:.1f}")


def drop_truncated(args, data):
    for group in data:
        for sample in group:
            sample.remove_sample = sample.status == Sample.Status.TRUNCATED


def minus_mean(args, samples, **kwargs):
    """slime hands over the samples of all groups in a row, and takes (raw rewards, rewards)."""
    raw = [sample.get_reward_value(args) for sample in samples]
    size = args.n_samples_per_prompt
    rewards = torch.tensor(raw).reshape(-1, size)
    return raw, (rewards - rewards.mean(dim=-1, keepdim=True)).flatten().tolist()
