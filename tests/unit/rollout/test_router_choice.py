"""Which of several routers a request goes to, and to which when that one is away."""

from collections import Counter

import pytest

from vime.config.parse import Args, Config
from vime.rollout.engine_client import routers_of
from vime.rollout.generation import close_clients, engine_client
from vime.types import ConfigError

THREE = ("http://a", "http://b", "http://c")
SESSIONS = [f"group-{number}" for number in range(3000)]


def test_a_run_with_one_router_has_no_choice() -> None:
    assert routers_of(("http://a",), "group-1", [5, 6]) == ["http://a"]


def test_every_process_sends_a_session_to_the_same_router_also_after_a_restart() -> None:
    """Python's own hash differs between processes. Of group-0 to group-11: BLAKE2b of 8 bytes, as a big-endian number,
    modulo 2."""
    firsts = [routers_of(("0", "1"), session)[0] for session in SESSIONS[:12]]
    assert "".join(firsts) == "011000100001"
    assert routers_of(("0", "1"), "group-1", [5, 6]) == routers_of(("0", "1"), "group-1", [7])


def test_each_router_has_its_share_of_the_sessions() -> None:
    firsts = Counter(routers_of(THREE, session)[0] for session in SESSIONS)
    assert sorted(firsts) == sorted(THREE)
    assert all(900 < count < 1100 for count in firsts.values()), firsts  # 1,000 of 3,000; 26 is one standard deviation


def test_sessions_of_a_router_that_is_away_spread_over_all_others_and_no_other_moves() -> None:
    orders = [routers_of(THREE, session) for session in SESSIONS]
    assert all(sorted(order) == sorted(THREE) for order in orders)
    seconds = Counter((order[0], order[1]) for order in orders)
    assert len(seconds) == 6  # 500 of each
    assert all(420 < count < 580 for count in seconds.values()), seconds


def test_requests_without_a_session_go_where_their_prompt_goes() -> None:
    prompts = [[number, 7, 9] for number in range(300)]
    firsts = [routers_of(THREE, "", prompt)[0] for prompt in prompts]
    assert firsts == [routers_of(THREE, "", tuple(prompt))[0] for prompt in prompts]
    assert all(70 < count < 130 for count in Counter(firsts).values()), firsts
    assert routers_of(THREE, "", [1, 23]) != routers_of(THREE, "", [12, 3])


async def test_who_sends_to_a_run_knows_all_of_its_routers() -> None:
    connected = Config().replace(vllm_router_ip="127.0.0.1", vllm_router_port=8000, vllm_router_count=3)
    try:
        client = engine_client(Args(connected))
        assert client.urls == tuple(f"http://127.0.0.1:{port}" for port in (8000, 8001, 8002))
        assert engine_client(Args(connected)) is client
    finally:
        close_clients()
    with pytest.raises(ConfigError, match="no router address"):
        engine_client(Args(Config().replace(vllm_router_count=3)))
