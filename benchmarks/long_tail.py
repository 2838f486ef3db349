"""A long-tailed workload on a real engine: --custom-generate-function-path benchmarks/long_tail.py:generate.

Each answer is what the policy says, scored as ever. Behind it the engine decodes a log-normal number of further tokens,
as long as VIME_LONG_TAIL says at most: the engine samples them and the trainer computes over them, but their mask is 0,
so that what is learned, and with it the reward, is that of the same task with short answers.
"""

import hashlib
import math
import os
import random

from vime.backends.vllm_utils.scripted_server import MEDIAN_SHARE, SPREAD
from vime.rollout.generation import engine_client
from vime.rollout.generation import generate as answer
from vime.rollout.rm_hub import async_rm
from vime.types import Sample

LONGEST = int(os.environ.get("VIME_LONG_TAIL", "256"))


def tail_length(sample: Sample) -> int:
    """Of this sample in every run: log-normal, the scripted engine's distribution, cut at LONGEST."""
    seed = hashlib.blake2b(f"{sample.group_index}/{sample.index}".encode(), digest_size=8).digest()
    length = LONGEST * MEDIAN_SHARE * math.exp(SPREAD * random.Random(seed).gauss())
    return min(LONGEST, max(1, round(length)))


async def generate(args, sample, sampling_params):
    sample = await answer(args, sample, sampling_params)
    sample.reward = await async_rm(args, sample)
    length = tail_length(sample)
    params = {**sampling_params, "max_tokens": length, "min_tokens": length, "ignore_eos": True}
    (tail,) = await engine_client(args).generate(sample.tokens, params, session_id=sample.session_id)
    sample.append_response_tokens(tail.token_ids, tail.log_probs, trainable=False, versions=tail.versions)
    return sample
