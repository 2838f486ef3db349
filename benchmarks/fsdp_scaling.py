"""Seconds and memory of one pass of the FSDP2 engine by tokens of a pack: does it cost what its tokens cost?

    .venv/bin/python benchmarks/fsdp_scaling.py [--tokens 2048 4096 8192 16384] [--sequence 256] [--mask-up-to 4096]

One rank, a random Qwen2 (hidden 256, 4 layers, vocabulary 4096), fp32, one thread; sequences of equal length, half of
each the response. Beside it transformers' own way of packing: the same model under attention `sdpa`, which tells
sequences apart by a T x T mask made from the positions. Each measurement is a process of its own, best of the repeats:
CPU seconds of forward and backward, and the peak of resident memory above what the process held before.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

WAYS = ("vime_packed", "sdpa")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--sequence", type=int, default=256, help="tokens of one sequence (default: 256)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mask-up-to", type=int, default=4096, help="tokens above which the mask is left out (4096)")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print(f"{'tokens':>8}" + "".join(f"{way:>16} s {'us/token':>10} {'MiB':>7}" for way in WAYS))
    with tempfile.TemporaryDirectory() as directory:
        for tokens in options.tokens:
            line = f"{tokens:>8}"
            for way in WAYS if tokens <= options.mask_up_to else WAYS[:1]:
                arguments = (directory, way, tokens, options.sequence, options.repeats)
                with spawn.Pool(1) as pool:
                    seconds, mebibytes = pool.apply(measure, arguments)
                line += f"{seconds:>18.2f} {1e6 * seconds / tokens:>10.0f} {mebibytes:>7.0f}"
            print(line, flush=True)


def measure(directory: str, way: str, tokens: int, sequence: int, repeats: int) -> tuple[float, float]:
    """(CPU seconds, MiB) of one accumulate over one pack."""
    import torch

    from vime.backends.fsdp_utils import engine as room
    from vime.backends.fsdp_utils.backend import FsdpBackend
    from vime.config.parse import Config
    from vime.data.rows import TrainRow
    from vime.types import EngineSpec, RankInfo, Role
    from vime.utils.network import free_port

    torch.set_num_threads(1)
    model = make_model(Path(directory))
    config = Config().replace(device="cpu", distributed_backend="gloo", hf_checkpoint=model, train_backend="fsdp")
    rank = RankInfo(rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port())
    backend = FsdpBackend(config, rank)
    spec = EngineSpec(role=Role.ACTOR, checkpoint=model, flag="", total_steps=1, lr=1e-6, lr_warmup_iters=0)
    engine: room.FsdpEngine = backend.build(spec)
    if way == "sdpa":
        engine._model.set_attn_implementation("sdpa")
    response = sequence // 2
    row = TrainRow(
        sample_index=0,
        group_index=0,
        rollout_id=0,
        tokens=[number * 7 % 4096 for number in range(sequence)],
        response_length=response,
        loss_mask=[1] * response,
        rollout_log_probs=[-1.0] * response,
        token_policy_versions=(),
        reward=1.0,
        raw_reward=1.0,
        status="completed",
        truncated=False,
    )
    rows = [row] * (tokens // sequence)

    def loss(value_T: torch.Tensor, entropy_T: torch.Tensor, _: object, /) -> tuple[torch.Tensor, torch.Tensor]:
        return -value_T.sum() / tokens + 0.0 * entropy_T.sum(), value_T.detach().sum()[None]

    engine.accumulate([[row]], [{}], loss)
    before, best = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, float("inf")
    for _ in range(repeats):
        started = time.process_time()
        engine.accumulate([rows], [{}], loss)
        best = min(best, time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    backend.close()
    return best, (peak - before) / 1024


def make_model(directory: Path) -> str:
    """A random model, made once."""
    if not (directory / "config.json").is_file():
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        )
        Qwen2ForCausalLM(config).save_pretrained(directory)
    return str(directory)


if __name__ == "__main__":
    main()
