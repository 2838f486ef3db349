"""What Vime does not have: refused when it is loaded, with the line."""

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.data import Dataset


def keep(args, samples, **kwargs):
    output = DynamicFilterOutput(keep=len(samples) > len(Dataset.__name__))
    output.keep_when_insufficient = True
    return output
