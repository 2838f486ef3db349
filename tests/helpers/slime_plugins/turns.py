"""Generate functions that set the fields of a sample themselves, or make a new one: no word of versions."""

import asyncio
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample


def address(args):
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


async def ask(args, ids, params):
    output = await post(address(args), {"input_ids": ids, "sampling_params": params, "return_logprob": True})
    return [entry[1] for entry in output["meta_info"]["output_token_logprobs"]], output


async def set_fields(args, sample: Sample, sampling_params, evaluation=False) -> Sample:
    """Two turns with an observation between; log-probabilities as the engine said them."""
    prompt = list(sample.tokens)
    first, output = await ask(args, prompt, sampling_params)
    observation = [6]
    second, again = await ask(args, prompt + first + observation, sampling_params)
    sample.tokens = prompt + first + observation + second
    sample.response_length = len(first) + 1 + len(second)
    sample.loss_mask = [1] * len(first) + [0] + [1] * len(second)
    said = [[entry[0] for entry in one["meta_info"]["output_token_logprobs"]] for one in (output, again)]
    sample.rollout_log_probs = said[0] + [0.0] + said[1]
    sample.response = output["text"] + again["text"]
    sample.status = Sample.Status.COMPLETED
    sample.metadata["evaluation"] = evaluation
    return sample


async def new_sample(args, sample: Sample, sampling_params) -> Sample:
    """A sample of its own, with the status as a word and without log-probabilities."""
    prompt = list(sample.tokens)
    answer, output = await ask(args, prompt, sampling_params)
    made = Sample(
        index=sample.index,
        prompt=sample.prompt,
        tokens=prompt + answer,
        response=output["text"],
        reward=1.0,
        loss_mask=[1] * len(answer),
        status="completed",
        metadata={"task": 3},
    )
    made.response_length = len(answer)
    return made


async def agents(args, sample: Sample, sampling_params) -> list[Sample]:
    """Several agents: attributes on `args`, copies of it, rewards asked for in the middle, a sample for each agent."""
    args.sampling_params = sampling_params
    args.results = {"solver": []}
    args = deepcopy(args)
    args.sample = sample

    async def solve(number):
        answer, output = await ask(args, list(args.sample.tokens), args.sampling_params)
        one = deepcopy(args.sample)
        said = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        one.append_response_tokens(args, tokens=answer, log_probs=said, trainable=True, meta_info=output["meta_info"])
        one.response, one.role = output["text"], f"solver-{number}"
        args.results["solver"].append(one)

    await asyncio.gather(*(solve(number) for number in range(3)))
    rewards = await batched_async_rm(args, args.results["solver"])
    for one, reward in zip(args.results["solver"], rewards, strict=True):
        one.reward = reward * 0.5
    assert load_function("json.dumps")([1]) == "[1]"
    return args.results["solver"]


async def guesses(args, sample: Sample, sampling_params) -> Sample:
    """Trains on tokens that the engine never said: an answer that was written over."""
    answer, _ = await ask(args, list(sample.tokens), sampling_params)
    sample.append_response_tokens(args, tokens=[7, *answer], log_probs=[-0.5] * (1 + len(answer)), trainable=True)
    sample.status = Sample.Status.COMPLETED
    return sample
