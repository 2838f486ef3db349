"""Real vLLM under --reference-mode: an answer is the same to the bit whoever is asked beside it or before it.

The MLP is wide enough for the CPU's matrix products to round otherwise in a batch (docs/log.md): without the engine's
reference flags every answer below differs between the two orders. The prompts are long enough to be cut in two by a
smaller token budget, which kills the engine, and to share cached blocks.
"""

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Sequence

import psutil
import pytest

from tests.helpers import tiny_models
from tests.helpers.engines import CONTEXT, KEYS, engine_config, started
from vime.backends.vllm_utils.engine import EngineProcess
from vime.backends.vllm_utils.guard import session_members
from vime.rollout.engine_client import EngineClient
from vime.rollout.exchanges import Completion
from vime.rollout.loops import rollout_loop
from vime.rollout.seeds import request_seed
from vime.types import Sample

TEXT = [5 + (7 * position) % 90 for position in range(600)]
PROMPTS = [TEXT[: CONTEXT - 16], TEXT[:300], TEXT[3:25], TEXT[:140] + TEXT[5:90], TEXT[:129]]
ASKED = [(prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(2)]
Bits = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module")
def reference_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tiny_models.make_qwen3(tmp_path_factory.mktemp("wide"), mlp_size=2048)
    yield from started(engine_config(model, reference_mode=True), tmp_path_factory.mktemp("reference_run"))


async def ask(client: EngineClient, prompt: int, sample: int) -> Bits:
    seed = request_seed(1, Sample(group_index=prompt, index=sample), num_tokens=0)
    params = {"temperature": 1.0, "max_tokens": 16, "seed": seed}
    answer: Completion
    (answer,) = await client.generate(PROMPTS[prompt], params)
    return tuple(answer.token_ids), tuple(answer.log_probs)


async def one_by_one(client: EngineClient, order: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Bits]:
    return {asked: await ask(client, *asked) for asked in order}


async def all_at_once(client: EngineClient, order: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Bits]:
    return dict(zip(order, await asyncio.gather(*[ask(client, *asked) for asked in order]), strict=True))


async def abandoned(client: EngineClient, order: Sequence[tuple[int, int]]) -> None:
    """Every request is sent, and given up once the first is answered."""
    tasks = [asyncio.create_task(ask(client, *asked)) for asked in order]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_an_answer_depends_on_its_prompt_its_seed_and_the_weights_alone(reference_engine: EngineProcess) -> None:
    order = random.Random(0).sample(ASKED, len(ASKED))

    async def run() -> list[dict[tuple[int, int], Bits]]:
        client = EngineClient(reference_engine.url, max_in_flight=len(ASKED), timeout_s=60, key=KEYS.generate)
        try:
            answers = [await one_by_one(client, ASKED), await all_at_once(client, order)]
            await abandoned(client, order)
            return [*answers, await one_by_one(client, order)]
        finally:
            await client.aclose()

    alone, together, after_aborts = rollout_loop().run(run(), name="answers of the engine", timeout_s=120)
    assert alone == together == after_aborts
    assert all(alone[prompt, 0][0] != alone[prompt, 1][0] for prompt in range(len(PROMPTS)))  # other seeds, other draws


def test_killed_guard_and_server_leave_no_engine_core_although_nobody_is_there_to_end_it(
    reference_engine: EngineProcess,
) -> None:
    """Last use of this engine. SIGKILL of the guard makes the kernel send SIGKILL to the API server, whose child
    EngineCore is; each asked the kernel for that when it began, and a forked process does not inherit the wish."""
    guard = reference_engine.pid
    members = [psutil.Process(pid) for pid in session_members(guard) if pid != guard]
    [core] = [process for process in members if process.ppid() != guard]  # the API server's child
    assert "EngineCore" in " ".join(core.cmdline())
    os.kill(guard, signal.SIGKILL)
    _, alive = psutil.wait_procs(members, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
