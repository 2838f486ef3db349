"""The data types of Vime: sample, group, training row, plan, version, and the errors that end a run.

Every package imports this file and this file imports only the standard library. Shape letters used in comments here and
in tensor names everywhere: P prompts, N samples a prompt, R response tokens, T packed tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Version = int
"""A policy version: the number of optimiser rounds behind the weights. 0 is the initial weights."""

NOT_RECORDED = -1
"""Stands for an unknown expert number: the trainer's own router decides about the token."""

LARGEST_REWARD = 3.4028234663852886e38
"""The largest float32: advantages reach the loss in that type."""

Reward = float | dict[str, float]
"""The reward of one sample; --reward-key says which entry of a dict is trained on."""

RoutedExperts: TypeAlias = "Sequence[Sequence[Sequence[int]]] | NDArray[np.integer]"
"""Expert numbers [tokens, layers, top_k]."""


class SampleStatus(StrEnum):
    """How generation of one completion ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


FINISH_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}
"""The finish reasons of an engine."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by the weights of `version`."""

    version: Version
    start: int
    end: int


def tiling_fault(spans: Sequence[VersionSpan], length: int) -> str | None:
    """Return what is wrong with spans that must cover [0, length) without gap or overlap; None when nothing is."""
    covered = 0
    for span in spans:
        if span.start != covered or span.end <= span.start:
            return f"version spans {list(spans)} do not tile the tokens"
        covered = span.end
    return None if covered == length else f"version spans cover {covered} of {length} tokens"


Number = TypeVar("Number", int, float)
OWN = "own"
"""The key under which `Sample.to_dict` keeps attributes that plug-ins set, as far as JSON can hold them."""


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _plain_list(values: Iterable[Number]) -> list[Number]:
    """Return a list of numbers from a list, a tuple, an array or a tensor."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _copied_numbers(values: Iterable[float] | None) -> list[float] | None:
    return None if values is None else list(values)


_COPIES: dict[str, Callable[..., object]] = {  # each takes the type of its field
    **dict.fromkeys(("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs"), _copied_numbers),
    "status": str,
    "token_policy_versions": lambda spans: [[span.version, span.start, span.end] for span in spans],
    "rollout_routed_experts": lambda experts: getattr(experts, "tolist", lambda: copy.deepcopy(experts))(),
}
"""How some fields of a sample become JSON-ready; the others are deep copies. A deep copy looks at each entry, which
takes ten times as long for numbers."""


@dataclass(frozen=True, slots=True)
class PendingText:
    """Text of tokens that is not decoded yet. `decode` can be pickled: a function of a module, or a partial of one."""

    tokens: Sequence[int]
    decode: Callable[[Sequence[int]], str]


def _copied(name: str, value: object) -> object:
    return _COPIES[name](value) if name in _COPIES else copy.deepcopy(value)


class HasRewardKey(Protocol):
    """The attributes of `args` that this file reads."""

    @property
    def reward_key(self) -> str | None: ...


@dataclass
class Sample:
    """One completion of one prompt, as plug-ins see it; they may set attributes of their own.

    `tokens` is prompt + response. `loss_mask`, `rollout_log_probs` and the version spans cover the response only and
    always have `response_length` entries; extend them with `append_response_tokens`.
    """

    Status: ClassVar[type[SampleStatus]] = SampleStatus

    group_index: int = -1
    index: int = -1
    rollout_id: int = -1
    session_id: str = ""
    prompt: str | list[dict[str, object]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, object] | None = None
    multimodal_train_inputs: dict[str, object] | None = None
    label: object = None
    metadata: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] = field(default_factory=list)
    reward: Reward | None = None
    status: SampleStatus = SampleStatus.PENDING
    remove_sample: bool = False
    rollout_log_probs: list[float] = field(default_factory=list)
    policy_version: Version | None = None
    token_policy_versions: list[VersionSpan] = field(default_factory=list)
    # of prompt + response, nested or a numpy array; the last token may be missing
    rollout_routed_experts: RoutedExperts | None = None
    teacher_log_probs: list[float] | None = None
    attempt: int = 0  # of generating this prompt, in mode streaming; set when the group is stored

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def weight_versions(self) -> list[Version]:
        """The distinct versions that sampled this completion, oldest first."""
        return sorted({span.version for span in self.token_policy_versions})

    def append_response_tokens(
        self,
        *given: object,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        versions: Sequence[VersionSpan] | None = None,
        meta_info: Mapping[str, Mapping[str, object]] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extend the completion by tokens with their log-probabilities and version spans (spans relative to `tokens`).

        `given`: tokens and log-probabilities; or as in slime `args`, and everything else by name. `trainable=False` is
        for tokens that the policy did not choose (tool output): they enter the context, not the loss, and need neither
        log-probabilities nor versions. In a generate function, tokens that the policy chose do not need them either:
        they are filled in afterwards from the engine's responses (`vime/rollout/exchanges.py`).
        """
        words = [value for value in given if isinstance(value, Sequence)]
        tokens = words.pop(0) if tokens is None and words else tokens
        log_probs = words.pop(0) if log_probs is None and words else log_probs
        new: list[int] = [] if tokens is None else _plain_list(tokens)
        said = [math.nan if trainable else 0.0] * len(new) if log_probs is None else _plain_list(log_probs)
        if len(new) != len(said):
            raise ValueError(f"append_response_tokens: {len(new)} tokens but {len(said)} log-probabilities")
        fault = None if versions is None else tiling_fault(versions, len(new))
        if fault is not None:
            raise ValueError(f"append_response_tokens: {fault}")
        if text:
            self.response += text
        base = self.response_length
        self.loss_mask = [1] * base if self.loss_mask is None else self.loss_mask
        self.rollout_log_probs = [math.nan] * base if self.rollout_log_probs is None else self.rollout_log_probs
        self.tokens.extend(new)
        self.rollout_log_probs.extend(said)
        self.loss_mask.extend([int(trainable)] * len(new))
        self.response_length += len(new)
        spans = self.token_policy_versions
        if versions is None and new and not trainable and spans and spans[-1].end == base:
            versions = (VersionSpan(spans[-1].version, 0, len(new)),)  # context gets the version of the token before it
        self._extend_spans(versions or (), base)
        reason = (meta_info or {}).get("finish_reason")
        if update_terminal_info and reason is not None:
            self.status = FINISH_STATUS.get(str(reason["type"]), self.status)

    def set_pending_text(self, text: PendingText) -> None:
        """The response is the text of these tokens, decoded when read; at once in a subclass with its own field."""
        self.response = cast("str", text) if type(self).response is Sample.response else text.decode(text.tokens)

    def _extend_spans(self, versions: Sequence[VersionSpan], base: int) -> None:
        for span in versions:
            last = self.token_policy_versions[-1] if self.token_policy_versions else None
            if last is not None and last.version == span.version and last.end == base + span.start:
                self.token_policy_versions[-1] = VersionSpan(span.version, last.start, base + span.end)
            else:
                self.token_policy_versions.append(VersionSpan(span.version, base + span.start, base + span.end))
        if self.token_policy_versions:
            self.policy_version = self.weight_versions[0]

    def get_reward_value(self, args: HasRewardKey) -> float:
        """Return the reward to train on: the entry of a dict that --reward-key names."""
        return self.scalar_reward(args.reward_key)

    @property
    def effective_response_length(self) -> int:
        """Tokens of the completion that may be trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def scalar_reward(self, key: str | None = None) -> float:
        """Return the reward as one number; `key` picks the entry when the reward function returned a dict. RewardError
        when it is not finite or beyond float32: no advantage could be made of it."""
        reward = self.reward
        if isinstance(reward, Mapping):
            if key is None or key not in reward:
                raise RewardError(
                    f"sample {self.index}: the reward is a dict with keys {sorted(reward)}; expected one of them in "
                    f"--reward-key, got {key!r}. Set --reward-key."
                )
            reward = reward[key]
        if reward is None:
            raise RewardError(f"sample {self.index}: has no reward. The reward function must return one for each.")
        if not abs(reward) <= LARGEST_REWARD:
            raise RewardError(
                f"sample {self.index}: the reward is {reward!r:.60}; expected a finite number of at most "
                f"{LARGEST_REWARD:.2g}. Scale it where it is made: --custom-rm-path, --rm-url, or a generate function "
                "that sets sample.reward."
            )
        return float(reward)

    def to_dict(self, without: Collection[str] = ()) -> dict[str, object]:
        """Return a JSON-ready copy of the sample for `from_dict`; `without`: fields that are left out."""
        names = [entry.name for entry in dataclasses.fields(self)]
        record = {name: _copied(name, getattr(self, name)) for name in names if name not in without}
        own = {name: value for name, value in vars(self).items() if name not in names and _is_json(value)}
        return {**record, OWN: copy.deepcopy(own)} if own else record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Sample:
        fields = dict(record)
        fields["status"] = SampleStatus(fields["status"])
        fields["token_policy_versions"] = [VersionSpan(*span) for span in fields["token_policy_versions"]]
        own = fields.pop(OWN, {})
        sample = cls(**fields)
        vars(sample).update(own)
        return sample


def _read_response(sample: Sample) -> str:
    text = vars(sample).get("response", "")
    if isinstance(text, PendingText):
        vars(sample)["response"] = text = text.decode(text.tokens)
    return cast("str", text)


def _write_response(sample: Sample, text: str) -> None:
    vars(sample)["response"] = text


# Set after the dataclass is made: in its body a property would be taken as the default of the field.
Sample.response = property(_read_response, _write_response)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of every rank in one optimiser step.

    `micro_batches[dp_rank][i]` lists the row numbers (positions in the round's flattened groups) of that rank's i-th
    micro-batch. Every rank has the same number of micro-batches; one may be empty. The denominators are global to the
    step, over all ranks: samples, and trainable tokens. `sample_tokens`: (row, trainable tokens of its sample) for each
    row of a sample that has several (branches of a session), on whichever ranks; empty where every sample is one row.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    num_samples: int
    num_tokens: int
    sample_tokens: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(batch) for rank in self.micro_batches for batch in rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The global plan of one round, made once before dispatch so that no two ranks can disagree."""

    rollout_id: int
    steps: tuple[StepPlan, ...]

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks that the plan was made for."""
        return len(self.steps[0].micro_batches)

    def rows_of(self, dp_rank: int) -> tuple[int, ...]:
        """Return the row numbers that `dp_rank` needs in this round, ascending."""
        return tuple(sorted({row for step in self.steps for batch in step.micro_batches[dp_rank] for row in batch}))


class Role(StrEnum):
    """The purpose of a model in the trainer. Each role has an engine of its own (`protocols.TrainEngine`)."""

    ACTOR = "actor"  # the policy that learns and is published
    REFERENCE = "reference"  # frozen; the KL terms compare the policy with it
    CRITIC = "critic"  # a value head instead of a vocabulary; learns, is never published
    TEACHER = "teacher"  # frozen; on-policy distillation moves the policy towards it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The model that an engine holds. `flag` is the flag that named `checkpoint`, for messages."""

    role: Role
    checkpoint: str  # HF directory
    flag: str
    total_steps: int  # optimizer steps of this model in the whole run; 0 for a frozen one
    lr: float  # peak learning rate; 0 for a frozen model
    lr_warmup_iters: int  # optimizer steps of linear warm-up from 0

    @property
    def is_trainable(self) -> bool:
        return self.role in (Role.ACTOR, Role.CRITIC)

    @property
    def has_value_head(self) -> bool:
        return self.role is Role.CRITIC


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The place of this process among the trainer ranks, and where rank 0 listens for the rendezvous."""

    rank: int
    world_size: int
    local_rank: int  # index of this rank's GPU among those the process sees
    master_address: str
    master_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRule:
    """How logits become the probabilities that a token is drawn from, with vLLM's meaning of the three numbers."""

    temperature: float = 1.0
    top_k: int = -1  # keep the k likeliest; -1: all
    top_p: float = 1.0  # then keep the likeliest until they hold this mass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of one trainer rank. A replica is the ranks that compute one copy of a model on the same rows."""

    rank: int  # global
    world_size: int
    dp_rank: int  # which replica
    dp_size: int
    source_rank: int  # global rank that fetches the rows of this replica
    holds_tokens: bool  # logits and losses exist here (the last pipeline stage)
    speaks: bool  # of the ranks that hold the same tokens, exactly one does: its numbers enter sums over all ranks

    @property
    def is_source(self) -> bool:
        return self.rank == self.source_rank


KEY_HEADER = "X-Vime-Key"  # the HTTP header that carries a key of the run to an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """The address of one engine, and the key for its control routes. `name` is stable over restarts; `start` is not: an
    engine that is back at its old URL has neither connection nor weights of before."""

    name: str
    url: str
    key: str = field(default="", repr=False)
    num_workers: int | None = None  # that have to confirm weights; None: not known
    start: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {KEY_HEADER: self.key} if self.key else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What an engine reports: the version that it was given, and the hash of the weights that it loaded."""

    engine: str
    version: Version
    content_hash: str
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFnTrainOutput:
    """What a rollout function returns for training: whole groups, in the order they are to be trained."""

    samples: list[list[Sample]]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFnEvalOutput:
    """What a rollout function returns for evaluation: samples by data-set name."""

    data: Mapping[str, list[Sample]]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DynamicFilterOutput:
    """A filter's verdict on one group; `reason` is counted when the group is dropped."""

    keep: bool
    reason: str | None = None


class VimeError(Exception):
    """Base of every error of Vime. The message says what happened, got, expected and the next action."""

    exit_code = 3


class LostError(VimeError):
    """A failure that may be temporary (docs/faults.md): only such a failure restarts a run."""


class PartError(VimeError):
    """A part of the run raised an unexpected error: a restart would raise it again."""


class ConfigError(VimeError):
    """The configuration is refused before any process starts."""

    exit_code = 2


class DataError(VimeError):
    """A prompt file or record cannot be used."""


class RewardError(VimeError):
    """A reward function raised, returned an invalid value or did not return in time."""


class PluginError(VimeError):
    """A generate function, filter or other plug-in raised or returned something unusable."""


class EngineError(VimeError):
    """An engine or router refused a request or sent an invalid response."""


class EngineLostError(EngineError, LostError):
    """An engine or router did not start, died, hangs, or failed internally."""


class HandoffError(VimeError):
    """Rollouts cannot be handed to training."""


class HandoffLostError(HandoffError, LostError):
    """Rollouts were lost with the process that held them, before they reached training."""


class StaleError(VimeError):
    """A token older than the staleness bound reached training."""


class PublishError(VimeError):
    """An engine did not confirm the version and content hash of a weight update."""


class PublishLostError(PublishError, LostError):
    """A weight update was interrupted by a lost engine, rank or connection."""


class MismatchError(VimeError):
    """Trainer and engine give the same tokens different log-probabilities, and --on-train-rollout-diff says stop."""


class CheckpointError(VimeError):
    """A checkpoint cannot be written or read."""

    @classmethod
    def unwritable(cls, directory: Path, reason: str) -> CheckpointError:
        """Make the error, with the free disk space: torch's message does not say that a disk is full."""
        try:
            space = f" ({shutil.disk_usage(directory).free >> 20} MiB free there)"
        except OSError:
            space = ""
        return cls(
            f"the checkpoint {directory} could not be written{space}: {reason}. Check free space and permissions; the "
            "previous checkpoint is untouched."
        )

    @classmethod
    def unreadable(cls, directory: Path, error: BaseException, *, expected: str) -> CheckpointError:
        """Make the error. On a RuntimeError the cause may be memory or a peer rather than a damaged file, so the
        message then does not advise to remove the checkpoint first."""
        advice = "point --load to one, or remove it to start from --hf-checkpoint."
        if any(isinstance(cause, RuntimeError) for cause in (_rank_causes(error) or {0: error}).values()):
            advice = "but a lost peer or no memory fails like this too: read the log of each trainer rank first."
        return cls(f"--load {directory}: cannot be read: {describe(error)}. Expected {expected}; {advice}")


def describe(error: BaseException) -> str:
    """Return one short line about the error; for errors of several ranks that of the first."""
    for rank, cause in _rank_causes(error).items():
        return f"rank {rank}: {describe(cause)}"
    return f"{type(error).__name__} {error}".replace("\n", " ")[:300]


def is_machine_fault(error: BaseException) -> bool:
    """Return whether torch, NCCL, gloo or CUDA report that a device, the network, or a peer of a collective failed."""
    is_dist = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # torch's; it is not imported here
    return is_dist or (isinstance(error, (RuntimeError, OSError)) and bool(_FAULT_WORDS.search(str(error))))


def may_pass(error: BaseException) -> bool:
    """Return whether a restart may help."""
    is_lost = isinstance(error, (LostError, ConnectionError, TimeoutError))
    return is_lost or (not isinstance(error, VimeError) and is_machine_fault(error))


_FAULT_WORDS = re.compile(
    r"(?i)\bNCCL\b|\bECC\b|NVLink|unspecified launch failure|hardware error|gloo/transport|broken pipe"
    r"|timed out waiting|connection (closed|reset|refused)"
)  # without illegal access and lack of memory: those would happen again


def _rank_causes(error: BaseException) -> dict[int, BaseException]:
    """Return the errors of all ranks in torch's CheckpointException, each with its traceback; others have none."""
    failures: dict[int, tuple[BaseException, object]] = getattr(error, "failures", {})
    return {rank: cause for rank, (cause, _) in failures.items()}


class ClusterError(LostError):
    """Ray cannot be started or reached, resources are missing, or an actor died."""


class WaitTimeoutError(LostError):
    """A named wait reached its deadline."""

    def __init__(self, name: str, seconds: float, owner: str, advice: str = "") -> None:
        super().__init__(name, seconds, owner, advice)
        self.name, self.seconds, self.owner, self.advice = name, seconds, owner, advice

    def __str__(self) -> str:
        return f"waited {self.seconds:g} s for {self.name} (owner: {self.owner}), its deadline. {self.advice}".strip()
