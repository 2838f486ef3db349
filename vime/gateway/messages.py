"""Every message of the gateway's protocol `/v1`. JSON and msgpack have the same fields; docs/producer-protocol.md.

An unknown field is refused: a misspelt optional field would otherwise be lost in silence.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL = 1
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Reason = Annotated[str, Meta(min_length=1, max_length=500)]
Count = Annotated[int, Meta(ge=1, le=4096)]
VersionNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Span = tuple[TokenId, TokenId, VersionNumber]
Code = Literal[
    "not_this_message", "unknown_encoding", "invalid", "unauthorized", "forbidden", "no_such_call", "unknown_lease",
    "unknown_version", "unknown_file", "no_such_range", "lease_lost", "other_sample", "other_content", "run_over",
    "unconfirmed_version", "mixed_versions", "wrong_hash", "body_missing", "too_many_calls", "no_room",
    "unavailable", "failed", "internal", "too_large",
]  # fmt: skip


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all messages."""


class Register(Message):
    """A job begins, and says about itself what GET /v1/producers shows. Leases of an earlier process with the same
    token go to others at once, so a token belongs to one process at a time. `engines`: so many must report a version
    before the job has confirmed it; 0: one report is enough."""

    model: Annotated[str, Meta(max_length=200)] = ""
    engines: Annotated[int, Meta(ge=0, le=100_000)] = 0


class Registered(Message):
    """What a job must know before its first prompt."""

    producer: str
    protocol: int
    serving: int  # the version whose weights the job must load and confirm
    samples_per_prompt: int
    max_staleness: int
    temperature: float  # the trainer's log-probabilities are of the distribution at this one: sample from it
    lease_timeout_s: float  # a lease that is not renewed by a heartbeat for so long goes to another producer
    max_body_bytes: int
    reward_key: str = ""  # the entry that is trained on, when rewards have entries; empty: rewards are numbers
    extra_fields: list[str] = []  # what each sample must bring in `extra`
    evaluates: bool = False  # the run has no engines: its evaluations are for jobs whose token has scope eval


class Heartbeat(Message):
    """Renews every lease of the producer."""


class Alive(Message):
    leases: list[str]  # those that the producer still has; work on any other one will be refused
    serving: int
    lags: str = ""  # why the job gets no prompts; empty when it gets them
    is_exhausted: bool = False  # the run is over: what is in progress will not be trained


class Leave(Message):
    """The job ends: its leases go to others at once."""


class Left(Message):
    given_back: int


class EndProducer(Message):
    """Gives what a producer has leased to others, as if it had left. `revoke`: and refuses all of its tokens from now
    on, so that it does not come back."""

    producer: Name
    revoke: bool = False


class ProducerEnded(Message):
    """`revoked`: the ids of the tokens that this call revoked; none when it is repeated."""

    given_back: int
    revoked: list[str]


class LeasePrompts(Message):
    """Asks for prompts. `request` is chosen by the caller: a call that is repeated with it returns the same leases, and
    until it got some keeps its place in the line."""

    request: Name
    count: Count = 1
    wait_s: Annotated[float, Meta(ge=0, le=300)] = 0.0


class PromptSample(Message):
    index: int
    metadata: dict[str, object]


class Prompt(Message):
    """One group to generate: a completion for each of `samples`."""

    lease: str
    group: int
    attempt: int
    prompt: str | list[dict[str, object]]
    tokens: list[TokenId]  # the prompt as the run tokenised it: a completion begins after exactly these
    label: object
    samples: list[PromptSample]


class Prompts(Message):
    prompts: list[Prompt]
    serving: int
    waits_for: str = ""  # when there is no prompt: what must happen first
    lags: str = ""  # the same when it is for the job itself to load and report weights
    is_exhausted: bool = False  # no prompt is left, and none can come back: the job may leave


class GivenSample(Message):
    """One completion, or one row of a sample of several. T: tokens of prompt and completion, R: those of the
    completion. Bytes are the same numbers end to end, little-endian; in JSON as text in base64."""

    index: int
    tokens: list[TokenId] | bytes  # [T]; bytes: int32
    response_length: Annotated[int, Meta(ge=1)]  # R
    log_probs: list[float] | bytes  # [R] natural logarithms, of the distribution that was sampled from; bytes: float32
    versions: list[Span]  # [start, end, version]: tile [0, R)
    reward: float | dict[str, float]
    loss_mask: list[Literal[0, 1]] | bytes | None = None  # [R] 1: the policy chose it; all of them when left out
    status: Literal["completed", "truncated"] = "completed"
    response: str = ""
    extra: dict[str, object] = {}  # column -> its value, for each of `extra_fields`


class PutGroup(Message):
    """A whole group: a sample for each index of the prompt, in any order. The rows of one sample follow each other."""

    lease: Name
    samples: Annotated[list[GivenSample], Meta(min_length=1, max_length=4096)]


class PutSample(Message):
    """One sample of a group, which is committed when its last one is there."""

    lease: Name
    sample: GivenSample
    more_rows: Annotated[list[GivenSample], Meta(max_length=4096)] = []  # of the same sample


class PutOwnGroup(Message):
    """A whole group for a prompt that the job brought itself. `key` is chosen by the job: it counts once."""

    key: Name
    prompt: str | list[dict[str, object]]
    samples: Annotated[list[GivenSample], Meta(min_length=1, max_length=4096)]  # indices 0 .. samples_per_prompt - 1
    label: object = None
    metadata: dict[str, object] = {}
    wait_s: Annotated[float, Meta(ge=0, le=300)] = 0.0  # for a slot


class Put(Message):
    """The outcome of a put. `repeated`: an earlier call had this outcome already; nothing was counted again."""

    group: int
    attempt: int
    is_committed: bool
    missing: list[int] = []  # indices of samples that the group still waits for
    repeated: bool = False


class LeaseEvaluation(LeasePrompts):
    """Asks for prompts of an evaluation, and renews those that the producer has."""


class EvalSampling(Message):
    """How the completions of an evaluation are sampled. `top_k` -1: of all tokens."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


class EvalPrompt(Message):
    """One prompt of an evaluation set: a completion for each of `samples`, of the serving version alone."""

    lease: str
    set: str
    group: int  # its number in the set
    prompt: str | list[dict[str, object]]
    tokens: list[TokenId]
    label: object
    samples: list[PromptSample]
    sampling: EvalSampling


class EvalPrompts(Message):
    prompts: list[EvalPrompt]
    serving: int
    before_round: int = -1  # the evaluation: before which round it is
    waits_for: str = ""  # when there is no prompt: what must happen first
    lags: str = ""  # the same when it is for the job itself to load and report weights
    is_over: bool = False  # no evaluation will come any more


SAMPLE_FAILED = "a sample has failed: "


class PutEvaluated(Message):
    """The completions of one prompt of an evaluation; or instead of them why they have no reward. An error that begins
    with SAMPLE_FAILED says that there was nothing to reward: an agent broke, say."""

    lease: Name
    samples: Annotated[list[GivenSample], Meta(max_length=4096)] = []
    error: Annotated[str, Meta(max_length=2000)] = ""


class Evaluated(Message):
    """`repeated`: an earlier call had this outcome already; nothing was counted again."""

    repeated: bool


class EndLease(Message):
    """Ends a lease without a group."""

    lease: Name
    reason: Reason


class Ended(Message):
    repeated: bool


class WeightFile(Message):
    """One file of a version. GET /v1/weights/{version}/files/{name} returns its bytes."""

    name: str
    num_bytes: int
    sha256: str


class WeightManifest(Message):
    """The weights of one version. `content_hash`: what the job's engines must report."""

    version: VersionNumber
    content_hash: Name
    location: str  # the directory of the files, for a job that sees the same file system as the trainer
    files: list[WeightFile] = []


class Loaded(Message):
    """What engines of the job have loaded: engine -> content hash. A job may report its engines in several calls."""

    version: VersionNumber
    engines: Annotated[dict[Name, Name], Meta(min_length=1)]


class Confirmed(Message):
    version: int
    serving: int


class QueueState(Message):
    active: int
    ready: int
    retry: int
    held_groups: int
    held_tokens: int
    held_bytes: int
    leases: dict[str, int]  # attempts in progress by producer


class ProducerState(Message):
    name: str
    model: str  # as the job said; so is the next
    engines: int
    is_online: bool  # it called within `lease_timeout_s`
    seconds_since_call: float
    newest_version: int  # that it has confirmed; -1: none
    behind: int  # versions by which that is older than the serving one; -1: it has confirmed none
    groups_per_s: float  # over the last minutes
    committed: int  # since the gateway started
    refused: dict[str, int]  # code of the error -> calls
    lags: str


class Producers(Message):
    producers: list[ProducerState]


class ErrorBody(Message):
    """The body of every refusal."""

    code: Code  # stable: clients decide by it
    what: str
    got: str
    expected: str
    next: str
    may_repeat: bool  # the same call may succeed later, unchanged
