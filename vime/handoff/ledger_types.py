"""The types of the ledger: states of a group, rules of a run, tasks, payloads, results, and errors of its calls.

Standard library only: producers, consumers, the audit and the command line share these names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from vime.types import HandoffError, LostError, Version

EVAL_PREFIX = "eval/"
LEDGER_NAME, SPOOL_NAME = "ledger.db", "spool"  # in a run directory
OWN_KEY = "own_key"  # in the metadata of samples whose prompt a job brought itself
EXTERNAL = "external/"  # begins the name of a producer outside of the run: of its token


class State(StrEnum):
    """The state of a group. `durable` and `dropped` are terminal; docs/ledger.md has the diagram."""

    ISSUED = "issued"  # a producer generates it
    READY = "ready"  # complete and scored; its payload is stored
    LEASED = "leased"  # in a round that a trainer trains
    TRAINED = "trained"  # the optimizer has stepped on it
    DURABLE = "durable"  # a complete checkpoint contains that step
    RETRY = "retry"  # to be issued again, before any new prompt
    DROPPED = "dropped"  # will never be trained; the reason is stored


class RoundState(StrEnum):
    LEASED = "leased"
    REPLAY = "replay"  # its groups are known from before a restore and wait to be leased again
    TRAINED = "trained"
    DURABLE = "durable"


class StalePolicy(StrEnum):
    """What happens at lease to a group that is too old."""

    DROP = "drop"
    RETRY = "retry"


class RoundOrder(StrEnum):
    """Which groups a round takes, and in which order."""

    INDEX = "index"  # the lowest open group indices: independent of timing, but a slow group delays the round
    COMMIT = "commit"  # first ready, first trained


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRules:
    """The bounds of a run. `max_slots` is (max staleness + 1) * groups a round; None: no such bound.

    With `num_rounds` (of `groups_per_round` each, round r on version r) no prompt is issued that no round would train.
    """

    max_slots: int
    max_staleness: int
    lease_timeout_s: float
    stale_policy: StalePolicy = StalePolicy.DROP
    round_order: RoundOrder = RoundOrder.COMMIT
    max_groups: int | None = None  # groups, tokens and bytes of payloads between admission and `trained`
    max_tokens: int | None = None
    max_bytes: int | None = None
    num_rounds: int | None = None
    groups_per_round: int = 0
    partition: str = "train"

    @property
    def has_capacity(self) -> bool:
        return (self.max_groups, self.max_tokens, self.max_bytes) != (None, None, None)


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One attempt at one group. An attempt belongs to one producer and its number is never used again."""

    partition: str
    group: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.partition}/{self.group}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The data about stored bytes that the ledger keeps; `checksum` (CRC-32) tells two payloads of one task apart."""

    checksum: int
    num_bytes: int
    num_tokens: int
    num_rows: int
    min_version: Version  # oldest among trainable tokens of the group
    max_version: Version
    content: str = ""  # `receipts.group_content` of its rows; only the history keeps it, a leased group has none
    facts: bytes = field(default=b"", repr=False)  # `rows.encode_facts`: the numbers that a round is planned from


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedPrompt:
    """A prompt to generate, named by its group index. `partial`: tokens of an earlier attempt, to be continued."""

    task: Task
    partial: tuple[Task, int] | None = None  # (task, checksum) in the spool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGrant:
    """Prompts for a producer; when empty, `waits_for` says what must happen first."""

    prompts: tuple[IssuedPrompt, ...]
    serving: Version = 0  # the newest version that every engine confirmed
    waits_for: str = ""
    is_exhausted: bool = False  # no prompt is left and none can come back


class OwnOutcome(StrEnum):
    """What became of a group whose prompt the producer brought itself, when it asked by its key."""

    ISSUED = "issued"  # it may be stored and committed now
    COMMITTED = "committed"  # it was before; nothing is to be done
    OTHER_CONTENT = "other_content"  # the key names a group with other content
    WAITS = "waits"
    OVER = "over"  # no round is left that could train it


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """The groups of the train partition that a producer makes now."""

    producer: str
    groups: tuple[int, ...]
    silent_s: float  # since it was heard of: by a lease, a heartbeat or a put


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGrant:
    """`task`: the group, when the key has one; `waits_for`: what must happen first."""

    outcome: OwnOutcome
    task: Task | None = None
    waits_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Whether a payload may be stored now."""

    granted: bool
    waits_for: str = ""


class CommitOutcome(StrEnum):
    COMMITTED = "committed"
    DUPLICATE = "duplicate"  # this attempt is in the ledger already; nothing changed


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedGroup:
    task: Task
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLease:
    """Groups of one round in the order in which they are trained. Only the newest `fence` of a round is valid."""

    round_id: int
    fence: int
    version: Version
    groups: tuple[LeasedGroup, ...]
    is_replay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseResult:
    """A lease, or what it waits for; `is_drained`: no group is left or in progress; `too_old`: attempts that this call
    refused, which nobody will train."""

    lease: RoundLease | None
    waits_for: str = ""
    is_drained: bool = False
    too_old: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The result of a restart from a checkpoint."""

    replayed_rounds: tuple[int, ...]  # will be leased again with the same groups in the same order
    reissued: tuple[Task, ...]  # were in flight: issued again
    regenerated: tuple[Task, ...]  # payload lost, or sampled by weights that the replay does not reach
    reached: Version | None  # of the weights after the replay; None: no round was ever leased


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMark:
    """A line in the history of one ledger. A checkpoint keeps it, so that its ledger is recognised
    (ledger_identity.py)."""

    ledger_id: str
    sequence: int
    link: int


class TransitionError(HandoffError):
    """The group or round is not in a state that allows this; nothing changed."""


class LateAttemptError(TransitionError):
    """The attempt expired, or was replaced by a newer one; its result is not used."""


class LeaseLostError(TransitionError, LostError):
    """The round's lease expired or was given to another holder; this one must not train it."""


class PartitionError(HandoffError):
    """This call may not use that partition."""


class CapacityError(HandoffError):
    """A payload was not admitted, or is larger than the bound."""


class LedgerFileError(HandoffError):
    """The ledger's file cannot be used: newer schema, another program's file, a second writer, damage."""
