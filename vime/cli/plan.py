"""`vime plan`: what the trainer ranks of a command line would hold, and whether that fits, before there is a GPU."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from vime.backends.memory import RankBytes
from vime.cli.commands import Commands
from vime.cli.plan_figures import (
    GIB,
    RESERVE_GIB,
    TFLOPS,
    UPDATE_GB_PER_S,
    Rates,
    deadlines,
    doubts,
    estimate,
    show,
    verdict,
)
from vime.config.checks import resolve
from vime.config.hf_config import read_model_shape
from vime.config.layout import check_layout
from vime.config.parse import Config, collect
from vime.config.problems import Problems
from vime.observability.forecast import Forecast, forecast
from vime.observability.unit_costs import measure, recorded_config
from vime.ray.dry_run import Part, dry_run, longest_row, pack_lengths, ranks_per_node, world_size
from vime.types import ConfigError, Role, VimeError


def add_parsers(commands: Commands) -> None:
    """List it in the help of `vime`. `run_plan` gets its command line unparsed: most of it are flags of train.py."""
    text = "count what the trainer ranks of a command line would hold; flags of train.py follow"
    commands.add_parser("plan", help=text, add_help=False).set_defaults(run_command=_unreachable)


def _unreachable(arguments: argparse.Namespace) -> int:
    raise AssertionError(f"{arguments.command} is run before the command line is parsed")


def _rate(text: str) -> float:
    """Return a rate that can be divided by."""
    with contextlib.suppress(ValueError):
        if 0 < (rate := float(text)) < math.inf:
            return rate
    raise argparse.ArgumentTypeError(f"got {text}, expected a finite number above 0")


def run_plan(words: Sequence[str]) -> int:
    """Returns 0 when everything fits, 2 when it does not or the flags are refused, 3 when a run of --like cannot be
    read."""
    parser = argparse.ArgumentParser(
        prog="vime plan",
        allow_abbrev=False,
        description="Count what each kind of trainer rank holds. Needs no GPU, no Ray and no weights.",
        epilog="All other flags are those of train.py: vime train --help.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-passes", action="store_true", help="leave out forward and backward: no activations")
    text = "TFLOP/s of one GPU that trains (default: {:g}, assumed)"
    parser.add_argument("--trainer-tflops", type=_rate, metavar="X", help=text.format(TFLOPS))
    parser.add_argument(
        "--engine-tokens-per-sec", type=_rate, metavar="X", help="tokens/s of one engine, all its sequences together"
    )
    text = "GB/s of an update of the engines' weights (default: {:g}, assumed)"
    parser.add_argument("--update-gb-per-sec", type=_rate, metavar="X", help=text.format(UPDATE_GB_PER_S))
    parser.add_argument(
        "--like",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="run directories from the same machine and model: play the schedule with what these runs recorded, for "
        "tokens/s and staleness",
    )
    parser.add_argument("--async", dest="overlaps", action="store_true", help="--like: train_async.py will run it")
    own, flags = parser.parse_known_args(words)
    rates = Rates(
        trainer_tflops=own.trainer_tflops,
        engine_tokens_per_sec=own.engine_tokens_per_sec,
        update_gb_per_sec=own.update_gb_per_sec,
    )
    try:
        config, notes = read_flags(flags)
        figures = estimate(config, rates)
        waits = deadlines(config, figures)
        played = play(config, own.like, overlaps=own.overlaps) if own.like else {}
        parts = dry_run(config, with_passes=not own.no_passes)
    except VimeError as error:
        sys.stderr.write(f"vime plan: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("vime plan: stopped before it was done.\n")
        return 130
    fits, limit = verdict(config, parts)
    lines = [] if fits else advice(config, parts)
    notes += unmeasured(config, with_passes=not own.no_passes)
    notes += unlike(config, own.like)
    notes += doubts(config, waits)
    if own.json:
        record = {
            "fits": fits,
            "limit_gib": limit,
            "reserve_gib": RESERVE_GIB,
            "parts": [_record(part) for part in parts],
            "advice": lines,
            "notes": notes,
            "estimates": dataclasses.asdict(figures),
            "deadlines": [dataclasses.asdict(one) for one in waits],
            "forecasts": {engines: dataclasses.asdict(forecast) for engines, forecast in played.items()},
        }
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
    else:
        show(config, parts, figures, played, waits=waits, notes=notes, advice=lines)
    return 0 if fits else 2


def read_flags(flags: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the configuration with its derived defaults, and what is read differently. Refused are flags that cannot
    be read and layouts that cannot cut the model. Data, weights and devices need not be here."""
    problems = Problems()
    given, reading = collect(flags, problems, program="vime plan")
    problems.raise_all()
    config, notes = resolve(given), list(reading.notes)
    check_layout(config, read_model_shape(config.model.hf_checkpoint))
    if given.cluster.device == "auto" and config.cluster.device == "cpu":
        notes.append("planned for the CPU, because no GPU is here: add --device cuda to plan for GPUs.")
    if config.parallel.transformer_impl == "transformer_engine":
        notes.append("--transformer-impl transformer_engine: counted with local layers; its activations are not known.")
    return config, notes


def advice(config: Config, parts: Sequence[Part]) -> list[str]:
    """Flags that lower what the heaviest rank holds, those that cost least first."""
    parallel, batch, limit = config.parallel, config.batch, config.cluster.gpu_memory_gib
    part = max(parts, key=lambda one: one.heaviest.peak)
    rank = part.heaviest
    replicas = world_size(config) // parallel.ranks_per_replica
    is_megatron = config.cluster.train_backend == "megatron"
    lines = []
    if not parallel.bf16:
        lines.append("--bf16: parameters and activations take half")
    if is_megatron and not parallel.use_distributed_optimizer and replicas > 1:
        lines.append(f"--use-distributed-optimizer: main weights and moments are cut over {replicas} ranks")
    learned = sum(model.optimizer for model in rank.models.values())
    if is_megatron and not config.optimizer.optimizer_cpu_offload and learned:
        lines.append(
            f"--optimizer-cpu-offload: {learned / GIB:.1f} GiB of main weights and moments go to host memory, where "
            f"the {ranks_per_node(config)} ranks of a node then lock {learned * ranks_per_node(config) / GIB:.0f} GiB"
        )
    frozen = [role for role in part.roles if role not in (Role.ACTOR, Role.CRITIC)]
    if frozen and len(part.roles) > 1:
        lines.append(f"--separate-roles {' '.join(frozen)}: it gets GPUs of its own")
    if rank.activations:
        if parallel.recompute_granularity != "full":
            lines.append(
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1: a layer's "
                "activations are computed again in the backward pass"
            )
        longest = longest_row(config)
        if not batch.use_dynamic_batch_size and batch.micro_batch_size > 1:
            lines.append(f"--micro-batch-size 1, or --use-dynamic-batch-size --max-tokens-per-gpu {longest}")
        elif batch.use_dynamic_batch_size and (batch.max_tokens_per_gpu or 0) > longest:
            lines.append(
                f"--max-tokens-per-gpu {longest}: one of the longest sequences, now {batch.max_tokens_per_gpu}"
            )
        else:
            lines.append(f"shorter sequences: --rollout-max-response-len is {config.rollout.rollout_max_response_len}")
    if is_megatron:
        lines += _finer_cuts(config, rank, limit)
    else:
        lines.append("more ranks: --actor-num-nodes; every tensor is cut over all of them")
    return lines


def _finer_cuts(config: Config, rank: RankBytes, limit: float) -> list[str]:
    parallel, shape = config.parallel, read_model_shape(config.model.hf_checkpoint)
    tp, pp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.expert_model_parallel_size,
    )
    lines = []
    if shape.num_experts and shape.num_experts % (2 * ep) == 0:
        lines.append(f"--expert-model-parallel-size {2 * ep}: half of the experts a rank{_on(config, ep=2 * ep)}")
    if tp < 8 and shape.num_attention_heads % (2 * tp) == 0:
        finer = f"--tensor-model-parallel-size {2 * tp} --sequence-parallel"
        lines.append(f"{finer}: half of every layer a rank{_on(config, tp=2 * tp)}")
    if shape.num_layers % (2 * pp) == 0:
        lines.append(f"--pipeline-model-parallel-size {2 * pp}: half of the layers a rank{_on(config, pp=2 * pp)}")
    if rank.static / GIB > limit:
        lines.append(f"more GPUs: {rank.static / GIB:.1f} GiB of weights, gradients and moments alone pass {limit:g}")
    return lines


def _on(config: Config, *, tp: int | None = None, pp: int | None = None, ep: int | None = None) -> str:
    """Return how many ranks such a cut needs, where the run has others; else nothing."""
    parallel, world = config.parallel, world_size(config)
    tp, pp = tp or parallel.tensor_model_parallel_size, pp or parallel.pipeline_model_parallel_size
    ep = ep or parallel.expert_model_parallel_size
    needed = math.lcm(tp * pp * parallel.context_parallel_size, (parallel.expert_tensor_parallel_size or tp) * ep * pp)
    return "" if world % needed == 0 else f", on {needed} ranks or a multiple (now {world})"


def unmeasured(config: Config, *, with_passes: bool) -> list[str]:
    """What the figures leave out, and how far they can be believed."""
    lines = []
    if not with_passes:
        lines.append("activations are not counted.")
    elif config.cluster.train_backend == "fsdp":
        lines.append("--train-backend fsdp: activations, and the whole layers that a pass gathers, are not counted.")
    else:
        lengths = pack_lengths(config)
        lines.append(
            f"activations: of packs of {sum(lengths)} tokens in {len(lengths)} sequence(s), nearly all response; "
            "experts get equally many tokens. Counted by shape; an H100 took 2.7 % more in the one case measured."
        )
        if config.rollout.rollout_max_prompt_len is None:
            lines.append("prompts count as 1 token: say --rollout-max-prompt-len, or longer packs are possible.")
    if config.cluster.device == "cuda":
        lines.append(f"{RESERVE_GIB:g} GiB are kept for CUDA, NCCL and gaps of the allocator: assumed, never measured.")
    return lines


def play(config: Config, run_dirs: Sequence[Path], *, overlaps: bool) -> dict[int, Forecast]:
    """Forecast the run, and the same with half and twice as many engines, by their number."""
    costs, engines = measure(run_dirs, config), config.cluster.num_engines
    if not engines:
        raise ConfigError(
            "--like: this run has no engine of its own (--rollout-num-engines 0), and what jobs outside generate is in "
            "no record. Say --rollout-num-engines for as many as the jobs have together, or leave --like out."
        )
    return {
        count: forecast(config, costs, num_engines=count, overlaps=overlaps)
        for count in sorted({max(1, engines // 2), engines, 2 * engines})
    }


def unlike(config: Config, run_dirs: Sequence[Path]) -> list[str]:
    """What makes recorded runs unlike this one, where the forecast takes them to be alike."""
    lines = []
    for run_dir in run_dirs:
        recorded = recorded_config(run_dir)
        if recorded.model.hf_checkpoint != config.model.hf_checkpoint:
            lines.append(f"--like {run_dir}: trained {recorded.model.hf_checkpoint}, not {config.model.hf_checkpoint}.")
        if world_size(recorded) != world_size(config):
            lines.append(f"--like {run_dir}: had {world_size(recorded)} trainer rank(s), not {world_size(config)}.")
    return lines


def _record(part: Part) -> dict[str, object]:
    return {
        "roles": list(part.roles),
        "ranks": [
            dataclasses.asdict(rank)
            | {"static": rank.static, "activations": rank.activations, "peak": rank.peak, "host": rank.host}
            for rank in part.ranks
        ],
    }
