"""Sections about watching a run: tracking, agreement of trainer and engine, debugging."""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.flags import PathKind, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """Tracking."""

    run_dir: str | None = flag(None, "directory of this run; empty: runs/<date>-<time>", path=PathKind.FILE)
    keep_samples_mib: int = flag(
        256,
        "completions of every round are kept in RUN_DIR/samples for `vime samples`, up to this many MiB; beyond it "
        "rounds are removed evenly over the run, and of a round over a sixteenth of it groups are left out; 0: keep "
        "none",
        minimum=0,
    )
    log_interval: int = flag(
        10,
        "on a terminal: rounds between two permanent lines; a pipe and "
        "RUN_DIR/logs/progress.log get a line for every round",
        minimum=1,
    )
    use_wandb: bool = flag(False, "log metrics to Weights & Biases (works offline with --wandb-mode offline)")
    wandb_project: str = flag("vime", "wandb project")
    wandb_group: str | None = flag(None, "wandb group")
    wandb_mode: str = flag("online", "wandb mode", choices=("online", "offline", "disabled"))
    use_tensorboard: bool = flag(False, "write TensorBoard files to RUN_DIR/tensorboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementConfig:
    """Agreement of trainer and engine about the tokens of a round (docs/agreement.md)."""

    train_rollout_diff_threshold: float | None = flag(
        None,
        "mean |trainer - engine| log-probability above which rows are recorded for `vime diagnose`, nats a token; "
        "empty: 1e-4, with --bf16 6e-2, with --bf16 and experts 0.1",
        minimum=0,
    )
    on_train_rollout_diff: str | None = flag(
        None,
        "above it: record the rows, warn and continue (warn) or end the run before the weights move (stop); ignore: "
        "measure only (empty: warn, and ignore for sft_loss, recorded rounds and --debug-engine-module)",
        choices=("warn", "stop", "ignore"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Debugging: run one half alone, record and replay rollouts, another engine."""

    reference_mode: bool = flag(
        False,
        "the same bits from every mode and after every restart (docs/reference-mode.md): a seed for each completion, "
        "one sequence at a time per engine, one thread per process; slow. A plug-in must keep its own random draws, "
        "and seeds that it sends to the engine itself, fixed: Vime cannot check them",
    )
    debug_rollout_only: bool = flag(False, "generate and score, do not start the trainer")
    debug_train_only: bool = flag(
        False, "train on recorded rollouts, do not start engines (needs --load-debug-rollout-data)"
    )
    save_debug_rollout_data: str | None = flag(
        None, "record each round's samples, for example out/rollout_{rollout_id}.jsonl", path=PathKind.FILE
    )
    load_debug_rollout_data: str | None = flag(
        None, "train on recorded samples instead of generating", path=PathKind.FILE
    )
    debug_engine_module: str | None = flag(
        None,
        "Python module that is started as the engine in vLLM's place, on the CPU: "
        "vime.backends.vllm_utils.scripted_server has no model and responds at once; empty: vLLM",
    )
