"""A long-tailed workload on a real engine: --custom-generate-function-path benchmarks/long_tail.py:generate.

Each completion is the policy's own, scored as usual. The engine decodes on after its end, to a log-normal length that
VIME_LONG_TAIL bounds: the trainer computes over those tokens too, but their mask is 0, so that what is learned, and
with it the reward, is that of the same task with short completions.
"""

import hashlib
import math
import os
import random
from collections.abc import Sequence

from vime.backends.vllm_utils.scripted_server import MEDIAN_SHARE, SPREAD
from vime.rollout.generation import engine_client
from vime.rollout.prompts import load_tokenizer
from vime.rollout.rm_hub import async_rm
from vime.types import Sample, SampleStatus, VersionSpan

LONGEST = int(os.environ.get("VIME_LONG_TAIL", "256"))


def tail_length(sample: Sample) -> int:
    """Of this sample in every run: log-normal, the scripted engine's distribution, cut at LONGEST."""
    seed = hashlib.blake2b(f"{sample.group_index}/{sample.index}".encode(), digest_size=8).digest()
    length = LONGEST * MEDIAN_SHARE * math.exp(SPREAD * random.Random(seed).gauss())
    return min(LONGEST, max(1, round(length)))


async def generate(args, sample, sampling_params):
    """One request: the engine decodes on behind the end that the policy chose."""
    budget = sampling_params["max_tokens"]
    length = max(budget, tail_length(sample))
    params = {**sampling_params, "max_tokens": length, "ignore_eos": True}
    (decoded,) = await engine_client(args).generate(sample.tokens, params, session_id=sample.session_id)
    tokenizer = load_tokenizer(args.hf_checkpoint)
    own = list(decoded.token_ids[:budget])
    has_end = tokenizer.eos_token_id in own
    num_own = own.index(tokenizer.eos_token_id) + 1 if has_end else budget
    for start, end, trainable in ((0, num_own, True), (num_own, length, False)):
        sample.append_response_tokens(
            decoded.token_ids[start:end],
            decoded.log_probs[start:end],
            trainable=trainable,
            versions=_part(decoded.versions, start, end),
        )
    sample.status = SampleStatus.COMPLETED if has_end else SampleStatus.TRUNCATED
    sample.response = tokenizer.decode(own[:num_own], skip_special_tokens=True)
    sample.reward = await async_rm(args, sample)
    return sample


def _part(versions: Sequence[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """The spans of the tokens [start, end), relative to the first of them."""
    inside = [(span.version, max(span.start, start), min(span.end, end)) for span in versions]
    return [VersionSpan(version, first - start, last - start) for version, first, last in inside if first < last]
