"""A rollout function without an engine: the completions are the labels of the data, to be imitated (--loss-type
sft_loss).

    --loss-type sft_loss --rollout-function-path vime.rollout.sft_rollout.generate_rollout --debug-train-only \\
        --label-key answer --n-samples-per-prompt 1

Without --label-key a record's prompt is a list of chat messages, and every turn of the assistant is imitated.

Everything after it is the common loop: plan, queue, trainer, checkpoints. `--debug-train-only` leaves the engines out;
without it they run, so that evaluation can generate.
"""

from __future__ import annotations

from vime.config.parse import Args
from vime.protocols import DataSource
from vime.rollout import vllm_rollout
from vime.rollout.conversations import TURNS, turns_of
from vime.rollout.images import CHANGED
from vime.rollout.prompts import context_limit, load_tokenizer
from vime.types import DataError, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, SampleStatus, VersionSpan


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the next `--rollout-batch-size` groups, each completed by its label."""
    if evaluation:
        return vllm_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    groups = data_source.get_samples(args.rollout_batch_size)
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        if CHANGED in sample.metadata:  # no group of such a round may be left out
            raise DataError(str(sample.metadata[CHANGED]))
        complete_with_label(args, sample, version=rollout_id)
    lengths = [sample.response_length for sample in samples]
    return RolloutFnTrainOutput(
        samples=groups,
        metrics={"rollout/response_len_mean": sum(lengths) / len(lengths), "rollout/num_tokens": float(sum(lengths))},
    )


def complete_with_label(args: Args, sample: Sample, *, version: int) -> None:
    """Extend the sample by the turns of its conversation, or by its label's tokens and the tokenizer's end of sequence.

    No policy sampled these tokens: their log-probabilities are written as 0, and the version is the round's own, so
    that they are never stale.
    """
    if TURNS in sample.metadata:
        for ids, is_trained in turns_of(sample.metadata):
            spans = [VersionSpan(version, 0, len(ids))]
            sample.append_response_tokens(ids, [0.0] * len(ids), trainable=is_trained, versions=spans)
        tokenizer = load_tokenizer(args.hf_checkpoint)
        answer = sample.tokens[sample.prompt_length :]
        sample.response = str(tokenizer.decode(answer, skip_special_tokens=True))
        sample.status = SampleStatus.COMPLETED
        return
    if not isinstance(sample.label, str) or not sample.label:
        raise DataError(
            f"sample {sample.index}: the label is {sample.label!r}, expected the text to imitate. Name "
            "its key with --label-key, or give conversations: lists of messages with turns of the assistant."
        )
    tokenizer = load_tokenizer(args.hf_checkpoint)
    tokens = list(tokenizer(sample.label, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        tokens.append(tokenizer.eos_token_id)
    length, limit = len(sample.tokens) + len(tokens), context_limit(args)
    if length > limit:
        raise DataError(
            f"sample {sample.index}: prompt and completion have {length} tokens and the context is {limit} "
            "(--rollout-max-context-len or the model's limit). Shorten the record or remove it."
        )
    sample.append_response_tokens(tokens, [0.0] * len(tokens), versions=[VersionSpan(version, 0, len(tokens))])
    sample.response, sample.status = sample.label, SampleStatus.COMPLETED
