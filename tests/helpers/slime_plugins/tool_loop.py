"""A tool loop in the manner of slime: token ids out, token ids and log-probabilities back, a tool's words between."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

NUM_TURNS = 2


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.rollout_log_probs = None
    sample.rollout_top_p_token_ids = None
    sample.loss_mask = []
    sample.response, sample.response_length = "", 0
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    sample.num_calls = 0
    for _ in range(NUM_TURNS):
        params = {**sampling_params, "max_new_tokens": min(4, sampling_params["max_new_tokens"])}
        output = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [entry[1] for entry in meta["output_token_logprobs"]]
        said = [entry[0] for entry in meta["output_token_logprobs"]]
        sample.append_response_tokens(args, tokens=ids, log_probs=said, trainable=True, meta_info=meta)
        sample.response += state.tokenizer.decode(ids)
        if sample.num_calls == NUM_TURNS - 1:
            break
        tool_ids = state.tokenizer("b", add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=tool_ids, trainable=False)
        sample.response += "b"
        sample.num_calls += 1
        assert len(sample.rollout_log_probs) == sample.response_length == len(sample.loss_mask)
    sample.payload_text = sample.prompt + sample.response
    return sample
