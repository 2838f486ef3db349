"""--transferqueue-round-order at staleness 1, with a group that takes longer than the round after its own."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.scripted_engine import Reply, ScriptedEngine
from tests.helpers.streaming import Streaming, groups_of, wait_until
from vime.handoff.ledger_types import RoundOrder, StalePolicy

EOS, SLOW = 2, 2
PLUG_IN = f"""
import asyncio, threading
from vime.rollout.generation import generate as ask
go_on = threading.Event()
async def generate(args, sample, sampling_params):
    answer = await ask(args, sample, sampling_params)
    if sample.group_index == {SLOW} and not go_on.is_set():
        await asyncio.to_thread(go_on.wait, 60)
    return answer
"""


class OneSlowGroup:
    """Rounds of two; groups 0 to 3 are sent to version 0, and group 2 is slow. Round 0 has trained 0 and 1, so that
    groups 4 and 5 are sent to version 1, and are answered."""

    def __init__(self, directory, model_dir, **rules):
        (directory / "slow.py").write_text(PLUG_IN)
        self.version = 0
        self.engine = ScriptedEngine(lambda _: Reply(token_ids=[EOS], version=str(self.version)))
        self.engine.__enter__()
        flag = ("--custom-generate-function-path", f"{directory / 'slow.py'}:generate")
        self.run = Streaming(directory, self.engine, model_dir, *flag, staleness=1, rounds=5, **rules)
        self.run.__enter__()

    def __enter__(self):
        self.play(0)
        wait_until(self.run, lambda: self.run.status().ready == 3)  # 3, 4 and 5
        return self

    def __exit__(self, *_):
        self.run.__exit__()
        self.engine.__exit__(None, None, None)

    def play(self, round_id):
        groups = groups_of(self.run.lease(round_id))
        self.version = round_id + 1
        self.run.train(round_id)
        return groups

    def finish_the_slow_one(self):
        sys.modules["vime_plugin_slow"].go_on.set()


def test_in_the_order_of_the_prompts_a_round_waits_for_its_slow_group_and_none_gets_too_old(tmp_path, model_dir):
    with OneSlowGroup(tmp_path, model_dir) as slow, ThreadPoolExecutor(1) as thread:
        second = thread.submit(slow.play, 1)
        wait_until(slow.run, lambda: not second.done() and slow.run.status().ready == 3)
        slow.finish_the_slow_one()
        assert second.result(60) == [2, 3]
        assert slow.play(2) == [4, 5]
        assert slow.run.status().too_old == 0


@pytest.mark.parametrize("policy", StalePolicy)
def test_first_ready_first_trained_goes_on_without_it_and_then_it_is_too_old(tmp_path, model_dir, policy):
    rules = {"round_order": RoundOrder.COMMIT, "stale_policy": policy}
    with OneSlowGroup(tmp_path, model_dir, **rules) as slow:
        assert SLOW not in slow.play(1)
        slow.finish_the_slow_one()
        state = "select state from prompt_group where grp = ?"
        wait_until(slow.run, lambda: slow.run.look(state, SLOW) == [("ready",)])
        assert SLOW not in slow.play(2)
        fourth = slow.play(3)
        assert slow.run.status().too_old == 1
        held = (*slow.run.store._held, *(key for _, key in slow.run.queue.chunks))  # without a checkpoint, too
        assert not [one for one in map(str, held) if one.startswith(f"train/{SLOW}#1")]
        rows = slow.run.look("select state, attempt from prompt_group where grp = ?", SLOW)
        assert rows[0] == ("dropped", 1) if policy is StalePolicy.DROP else rows[0][1] == 2
        assert SLOW not in fourth or policy is StalePolicy.RETRY
