"""Turns made of text in the manner of slime: a request carries the words so far, fields are set at the end."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    text, ids, mask, log_probs = "", [], [], []
    for turn in range(2):
        params = {**sampling_params, "stop": ["##"]}
        payload = {"text": sample.prompt + text, "sampling_params": params, "return_logprob": True}
        output = await post(url, payload)
        new = [entry[1] for entry in output["meta_info"]["output_token_logprobs"]]
        said = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        sample.append_response_tokens(args, tokens=new, log_probs=said, trainable=True, meta_info=output["meta_info"])
        text, ids, mask, log_probs = text + output["text"], ids + new, mask + [1] * len(new), log_probs + said
        if turn == 0:
            found = state.tokenizer("bb", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=found, trainable=False)
            text, ids, mask = text + "bb", ids + found, mask + [0] * len(found)
            log_probs = log_probs + [0.0] * len(found)
    sample.tokens = prompt_ids + ids
    sample.response_length, sample.response = len(ids), text
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample
