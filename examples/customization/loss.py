"""A loss of one's own: plain REINFORCE towards the advantages, with a bonus for entropy.

--loss-type custom_loss --custom-loss-path examples/customization/loss.py:reinforce
"""

ENTROPY_WEIGHT = 0.01


def reinforce(args, logp_T, entropy_T, columns):
    """The loss of every token. Vime leaves out masked tokens and divides by the step's samples (or tokens)."""
    return -columns["advantage"] * logp_T - ENTROPY_WEIGHT * entropy_T
