"""The whole algorithm in one file: GRPO from prompt to published weights with Vime's own formulas, plan, tickets
and version ledger, and without Ray, vLLM or megatron. Read this first; the big loop does the same with real parts.

    .venv/bin/python examples/minimal_loop.py

Task: the prompt is a digit d, the completion is three digits, the reward is the share of its digits that equal d. The
policy is a table of logits (a bigram model), the engine is a loop over torch.multinomial.
"""

import logging
import sys

import torch
from torch import Tensor

from vime.algo.advantages import group_advantages
from vime.algo.losses import policy_loss, reduce_loss
from vime.batching.pack import pack
from vime.batching.plan import plan_round
from vime.data.rows import TrainRow
from vime.handoff.group_store import MemoryStore, PayloadStore, RoundStore, encode_group
from vime.handoff.ticket import RoundTicket, check_staleness, make_ticket, read_rows
from vime.types import EngineReport, Sample, SampleStatus, Version, VersionSpan
from vime.weights.hashing import content_hash
from vime.weights.versions import VersionLedger

logger = logging.getLogger("minimal_loop")

VOCAB = 10
RESPONSE_LENGTH = 3
NUM_PROMPTS, SAMPLES_PER_PROMPT = 8, 8


class TableEngine:
    """Generates with a copy of the weights, and says which version and content it serves."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._version: Version = 0

    def load(self, weights: dict[str, Tensor], version: Version) -> EngineReport:
        self._weights = {name: tensor.clone() for name, tensor in weights.items()}
        self._version = version
        return EngineReport(
            engine="table", version=version, content_hash=content_hash(self._weights), num_tensors=len(weights)
        )

    def generate(self, prompt: list[int], generator: torch.Generator) -> Sample:
        sample = Sample(tokens=list(prompt), label=prompt[-1])
        for _ in range(RESPONSE_LENGTH):
            logp_V = self._weights["logits"][sample.tokens[-1]].log_softmax(-1)
            token = int(torch.multinomial(logp_V.exp(), 1, generator=generator))
            sample.append_response_tokens([token], [float(logp_V[token])], versions=[VersionSpan(self._version, 0, 1)])
        sample.status = SampleStatus.COMPLETED
        return sample


def reward(sample: Sample) -> float:
    completion = sample.tokens[-RESPONSE_LENGTH:]
    return sum(token == sample.label for token in completion) / RESPONSE_LENGTH


def generate_round(engine: TableEngine, rollout_id: int, generator: torch.Generator) -> list[list[Sample]]:
    groups = []
    for number in range(NUM_PROMPTS):
        prompt = [int(torch.randint(VOCAB, (1,), generator=generator))]
        group = [engine.generate(prompt, generator) for _ in range(SAMPLES_PER_PROMPT)]
        for position, sample in enumerate(group):
            sample.group_index, sample.rollout_id = rollout_id * NUM_PROMPTS + number, rollout_id
            sample.index = sample.group_index * SAMPLES_PER_PROMPT + position
            sample.reward = reward(sample)
        groups.append(group)
    return groups


def to_rows(group: list[Sample]) -> list[TrainRow]:
    """GRPO: the reward of a row is its advantage inside its group."""
    advantage_N = group_advantages(torch.tensor([sample.scalar_reward() for sample in group]), divide_by_std=True)
    return [
        TrainRow(
            sample_index=sample.index,
            group_index=sample.group_index,
            rollout_id=sample.rollout_id,
            tokens=sample.tokens,
            response_length=sample.response_length,
            loss_mask=sample.loss_mask,
            rollout_log_probs=sample.rollout_log_probs,
            token_policy_versions=sample.token_policy_versions,
            reward=float(advantage),
            raw_reward=sample.scalar_reward(),
            status=str(sample.status),
            truncated=False,
        )
        for sample, advantage in zip(group, advantage_N, strict=True)
    ]


def train_round(logits_VV: Tensor, optimizer: torch.optim.Optimizer, store: PayloadStore, ticket: RoundTicket) -> None:
    plan, rows = read_rows(store, ticket, 0)
    for step in plan.steps:
        optimizer.zero_grad()
        for numbers in step.micro_batches[0]:
            batch = pack([rows[number] for number in numbers])
            logp_T = logits_VV[batch.tokens_T].log_softmax(-1).gather(-1, batch.labels_T[:, None])[:, 0]
            log_ratio_T = logp_T - batch.rollout_logp_T
            loss_T, _ = policy_loss(log_ratio_T, batch.advantage_T, eps_clip=0.2, eps_clip_high=0.28)
            loss = reduce_loss(
                loss_T,
                batch.mask_T,
                batch.row_slices,
                per_token=False,
                num_samples=step.num_samples,
                num_tokens=step.num_tokens,
            )
            loss.backward()  # the denominators are the step's, so micro-batches simply add up
        optimizer.step()


def run(num_rounds: int, seed: int = 0) -> list[float]:
    """Train. Returns the mean reward of each round."""
    generator = torch.Generator().manual_seed(seed)
    logits_VV = torch.zeros(VOCAB, VOCAB, requires_grad=True)
    optimizer = torch.optim.Adam([logits_VV], lr=0.3)
    engine, store, versions = TableEngine(), MemoryStore(), VersionLedger()
    rounds = RoundStore(store, prefix="train", capacity=1, timeout_s=1)
    curve = []
    for rollout_id in range(num_rounds):
        # publish -> confirm -> release: the engine generates only with weights whose hash it confirmed
        weights = {"logits": logits_VV.detach()}
        versions.confirm([engine.load(weights, versions.trained)], content_hash(weights))
        groups = generate_round(engine, rollout_id, generator)
        curve.append(sum(sample.scalar_reward() for group in groups for sample in group) / sum(map(len, groups)))
        handed = [to_rows(group) for group in groups]
        rows = [row for group in handed for row in group]
        check_staleness(rows, version=versions.trained, max_staleness=0)
        plan = plan_round(
            rollout_id,
            [row.total_length for row in rows],
            [row.num_trainable for row in rows],
            dp_size=1,
            samples_per_step=len(rows),
            micro_batch_size=16,
            max_tokens_per_micro_batch=None,
        )
        # rows part from what is known of them: chunks into the store, facts and handles into the ticket
        encoded = [encode_group(group) for group in handed]
        partition, handles = rounds.put(rollout_id, encoded)
        facts = [group.facts for group in encoded]
        ticket = make_ticket(plan, list(zip(facts, handles, strict=True)), partition=partition)
        train_round(logits_VV, optimizer, store, ticket)
        rounds.clear(partition)
        versions.advance()
        logger.info("round %2d  version %2d  reward %.3f", rollout_id, versions.trained, curve[-1])
    return curve


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    run(30)
