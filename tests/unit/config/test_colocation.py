"""--colocate on the command line: what follows from it, which ranks an engine shares GPUs with, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.rollout_setup import write_model_directory
from vime.config.colocation import shared_ranks, sleep_level
from vime.config.command_line import parse_command_line
from vime.config.parse import Config
from vime.ray.cluster import demand_of
from vime.ray.preflight import preflight
from vime.ray.publisher import has_many_senders, senders
from vime.types import ConfigError, EngineAddress

GPUS = ("--device", "cuda", "--ray-address", "auto")


@pytest.fixture
def started(tmp_path: Path):
    """started(flags): the configuration of a run that may start."""
    write_model_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "train.jsonl").write_text('{"input": "1"}\n')
    common = [
        *("--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "train.jsonl"), "--num-rollout", "3"),
        *("--rm-type", "exact_match", "--rollout-max-response-len", "48", "--n-samples-per-prompt", "4"),
        *("--rollout-batch-size", "30", "--colocate"),
    ]

    def parsed(*flags: str) -> Config:
        return parse_command_line([*common, *flags])

    return parsed


def test_trainers_sleep_and_there_is_an_engine_for_all_their_gpus(started) -> None:
    config = started(*GPUS, "--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "2")
    assert config.cluster.offload_train
    assert (config.cluster.num_engines, config.cluster.rollout_num_gpus) == (4, 8)
    assert config.weights.update_weight_transport == "ipc", "NCCL takes no two processes on one GPU"
    assert demand_of(config).gpus == 8, "each GPU is asked for once"
    two = started(
        *GPUS, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "3", "--rollout-num-gpus-per-engine", "2"
    )
    assert two.cluster.num_engines == 2, "one on each node: an engine is on one"
    assert two.weights.update_weight_transport == "ipc", "a rank of its node sends to each"
    assert started("--device", "cpu", "--actor-num-gpus-per-node", "4").cluster.num_engines == 4


def test_each_engine_opens_the_memory_of_the_first_trainer_on_its_gpus(started) -> None:
    gpus = (*GPUS, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "5", "--rollout-num-gpus-per-engine", "2")
    config = started(*gpus)
    assert config.weights.update_weight_transport == "ipc"
    left = [EngineAddress(name=f"engine-{number}", url="") for number in (0, 1, 3)]  # engine-2 is lost
    assert senders(config, left) == {0: left[:1], 2: left[1:2], 7: left[2:]}
    assert has_many_senders(config)
    config = started("--device", "cpu", "--actor-num-gpus-per-node", "4")
    assert config.weights.update_weight_transport == "shm"
    assert senders(config, left) == {0: left[:1], 1: left[1:2], 3: left[2:]}


@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_rank_0_sends_to_all_over_a_network_or_files(started, transport: str) -> None:
    engines = [EngineAddress(name=f"engine-{number}", url="") for number in range(4)]
    config = started("--device", "cpu", "--actor-num-gpus-per-node", "4", "--update-weight-transport", transport)
    assert senders(config, engines) == {0: engines}
    assert not has_many_senders(config)


def test_an_engine_with_gpus_of_its_own_gets_weights_of_rank_0(started) -> None:
    config = started("--device", "cpu", "--actor-num-gpus-per-node", "4")
    apart = replace(config, cluster=replace(config.cluster, colocate=False))
    engines = [EngineAddress(name=f"engine-{number}", url="") for number in range(2)]
    assert senders(apart, engines) == {0: engines}


def test_an_engine_shares_the_next_ranks_of_a_node(started) -> None:
    config = started(
        *GPUS, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "5", "--rollout-num-gpus-per-engine", "2"
    )
    assert [list(shared_ranks(config, engine)) for engine in range(4)] == [[0, 1], [2, 3], [5, 6], [7, 8]]


def test_a_number_of_gpus_for_generation_that_fits_is_taken(started) -> None:
    """As slime's scripts give it: --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --colocate."""
    flags = (*GPUS, "--actor-num-gpus-per-node", "4", "--rollout-num-gpus")
    assert started(*flags, "4").cluster.num_engines == 4
    assert started(*flags, "2").cluster.num_engines == 2


def test_weights_are_discarded_only_where_an_update_of_all_of_them_always_follows(started) -> None:
    assert sleep_level(started()) == 2
    assert sleep_level(started("--update-weights-interval", "2", "--max-staleness", "1")) == 1
    assert sleep_level(started("--lora-rank", "4")) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--transferqueue-mode", "streaming"],
            "--transferqueue-mode streaming: there engines generate while trainers",
        ),
        (["--debug-rollout-only"], "--colocate with --debug-rollout-only has no effect"),
        ([*GPUS, "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "8"], "8 engine(s) of 1 GPU(s) are asked for"),
        (
            [*GPUS, "--actor-num-gpus-per-node", "2", "--actor-num-nodes", "4", "--rollout-num-gpus-per-engine", "4"],
            "--rollout-num-gpus-per-engine 4: a node has 2 trainer ranks",
        ),
        (
            [*GPUS, "--actor-num-gpus-per-node", "8", "--actor-num-nodes", "2", "--rollout-num-gpus-per-engine", "16"],
            "and an engine is on one node: over several it needs GPUs of its own",
        ),
        (["--device", "cpu", "--update-weight-transport", "ipc"], "the memory of a trainer rank on its GPU"),
        ([*GPUS, "--update-weight-transport", "nccl"], "NCCL takes no two processes on one GPU"),
        (
            ["--rollout-external-engine-addrs", "10.0.0.5:81", "--rollout-external-engine-keys", "keys"],
            "--colocate with --rollout-external-engine-addrs: those engines have GPUs of their own",
        ),
    ],
)
def test_what_cannot_take_turns_is_refused(started, flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        started(*flags)
    assert said in str(refused.value)
    assert "no trainer starts" not in str(refused.value), "nothing is said of --offload-train, which nobody gave"


def test_train_async_is_refused(started) -> None:
    config = started("--device", "cpu", "--max-staleness", "1")
    with pytest.raises(ConfigError, match=r"--colocate under train_async.py: the next round is generated while"):
        preflight(config, is_async=True)
    preflight(config, is_async=False)
