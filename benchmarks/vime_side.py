"""Vime's trainer as the benchmarks beside it run it: rows, a plan and one trainer rank in this process."""

import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # prompt, response: token ids; advantage


def make_row(draw: random.Random, prompt: int, response: int, vocab_size: int) -> Row:
    return {
        "prompt": [draw.randrange(1, vocab_size) for _ in range(prompt)],
        "response": [draw.randrange(1, vocab_size) for _ in range(response)],
        "advantage": draw.uniform(-1.5, 1.5),
    }


def make_model(
    directory: Path, *, family: str = "Qwen2", dtype: str = "float32", device: str = "cpu", **shape: Any
) -> Path:
    """A random tied Qwen2 (or Qwen3) of this shape (fields of its HF config), as a Hugging Face directory."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{"max_position_embeddings": 32_768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, **shape},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def to_train_rows(rows: list[Row]) -> list[Any]:
    from vime.data.rows import TrainRow
    from vime.types import VersionSpan

    return [
        TrainRow(
            sample_index=index,
            group_index=0,
            rollout_id=0,
            tokens=row["prompt"] + row["response"],
            response_length=len(row["response"]),
            loss_mask=[1] * len(row["response"]),
            rollout_log_probs=[-9.7] * len(row["response"]),  # about what a random model says; only metrics read it
            token_policy_versions=(VersionSpan(0, 0, len(row["response"])),),
            reward=row["advantage"],
            raw_reward=0.0,
            status="completed",
            truncated=False,
        )
        for index, row in enumerate(rows)
    ]


def one_step_plan(rows: list[Any], max_tokens: int | None = None) -> Any:
    """One optimizer step over all rows, in micro-batches of at most `max_tokens`; empty: in one."""
    from vime.batching.plan import plan_round

    return plan_round(
        0,
        [row.total_length for row in rows],
        [row.num_trainable for row in rows],
        dp_size=1,
        samples_per_step=len(rows),
        micro_batch_size=None,
        max_tokens_per_micro_batch=max_tokens or sum(row.total_length for row in rows),
    )


def make_worker(model: str, **flags: Any) -> Any:
    """One trainer rank."""
    from vime.config.parse import Config
    from vime.ray.backends import make_backend
    from vime.training.worker import TrainWorker
    from vime.types import RankInfo
    from vime.utils.network import free_port

    rank = RankInfo(rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port())
    config = Config().replace(hf_checkpoint=model, **flags)
    return TrainWorker(config, make_backend(config, rank), total_steps=1000)
