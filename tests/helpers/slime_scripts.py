"""Flags of launch scripts of slime, with the sizes of their models: for tests of what a user of slime meets here.

Taken from github.com/THUDM/slime at commit 624b824a8 (August 2026). {model}, {data}, {eval} and {out} stand for paths.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OFFLOAD = ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer")
_DENSE = (
    "--swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --group-query-attention"
)
QWEN3_4B = (
    f"{_DENSE} --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --num-query-groups 8 "
    "--norm-epsilon 1e-6 --vocab-size 151936 --kv-channels 128 --qk-layernorm"
)  # scripts/models/qwen3-4B.sh, without --rotary-base
QWEN25_05B = (
    f"{_DENSE} --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 --add-qkv-bias "
    "--norm-epsilon 1e-6 --rotary-base 1000000 --num-query-groups 2 --vocab-size 151936"
)  # scripts/models/qwen2.5-0.5B.sh
QWEN25_3B = (
    f"{_DENSE} --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 --add-qkv-bias "
    "--norm-epsilon 1e-6 --rotary-base 1000000 --num-query-groups 2 --vocab-size 151936"
)  # scripts/models/qwen2.5-3B.sh
GLM4_9B = (
    "--spec slime_plugins.models.glm4 get_glm_spec --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 "
    f"--num-attention-heads 32 --num-query-groups 2 {_DENSE} --add-qkv-bias --norm-epsilon 1e-5 --rotary-base 10000 "
    "--vocab-size 151552 --post-self-attn-layernorm --post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5 "
    "--no-rope-fusion --untie-embeddings-and-output-weights"
)  # scripts/models/glm4-9B.sh
QWEN3_30B = (
    "--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32 --num-query-groups 4 "
    "--kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --normalization RMSNorm "
    "--position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 1.0 --swiglu "
    "--untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000 --moe-ffn-hidden-size 768 "
    "--moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-router-topk 8 "
    f"--moe-layer-freq '[{', '.join(['1'] * 48)}]' --num-experts 128 --moe-grouped-gemm --moe-token-drop-policy probs "
    "--moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0"
)  # scripts/models/qwen3-30B-A3B.sh

SIZES = {
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "intermediate_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_key_value_heads",
    "--kv-channels": "head_dim",
    "--vocab-size": "vocab_size",
    "--norm-epsilon": "rms_norm_eps",
    "--rotary-base": "rope_theta",
    "--num-experts": "num_experts",
    "--moe-ffn-hidden-size": "moe_intermediate_size",
    "--moe-router-topk": "num_experts_per_tok",
}
"""Flag of megatron -> entry of config.json."""

_ROLLOUT = (
    "--prompt-data {data} --input-key prompt --label-key label --apply-chat-template --rollout-shuffle "
    "--num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 "
    "--rollout-temperature 1 --global-batch-size 256 --balance-data"
)
_EVAL = (
    "--eval-interval 20 --eval-prompt-data aime {eval} --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 "
    "--eval-top-p 1"
)
_LAYOUT = "--sequence-parallel --pipeline-model-parallel-size 1 --expert-tensor-parallel-size 1"
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size"
_GRPO = (
    "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 "
    "--eps-clip 0.2 --eps-clip-high 0.28"
)
_ADAM = "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98"
_MISC = (
    "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
    "--attention-backend flash"
)
_CHECKPOINTS = "--hf-checkpoint {model} --ref-load {model} --load {out} --save {out} --save-interval 20"


@dataclass(frozen=True, kw_only=True)
class Script:
    """One launch script. `shape`: the model's config.json; `then`: what the answer to the first start asks to change,
    flag -> the words in its place (none: it goes)."""

    source: str
    flags: str
    shape: dict[str, Any]
    program: str = "train.py"
    then: dict[str, str]

    def edited(self, paths: dict[str, Path]) -> list[str]:
        """After the one edit of paths and engine name."""
        words = [word.replace("--sglang-", "--vllm-") for word in shlex.split(self.flags)]
        for name, path in paths.items():
            words = [word.replace(f"{{{name}}}", str(path)) for word in words]
        return words

    def as_told(self, words: list[str]) -> list[str]:
        """After the second edit, which does what the first start said."""
        kept = without(words, *self.then)
        return kept + shlex.split(" ".join(filter(None, self.then.values())))


def shrunk(words: list[str], model: Path) -> list[str]:
    """The same command line for a tiny model, one round and the CPU: other sizes behind the same flags."""
    config = json.loads((model / "config.json").read_text())
    sizes = {flag: config[name] for flag, name in SIZES.items() if name in config}
    small = {
        "--num-rollout": 1,
        "--rollout-batch-size": 2,
        "--n-samples-per-prompt": 2,
        "--global-batch-size": 4,
        "--rollout-max-response-len": 8,
        "--eval-max-response-len": 8,
        "--n-samples-per-eval-prompt": 1,
        "--actor-num-gpus-per-node": 1,
        "--tensor-model-parallel-size": 1,
        "--rollout-num-gpus-per-engine": 1,
        "--max-tokens-per-gpu": 512,
        "--rotary-base": config["rope_parameters"]["rope_theta"],
        **sizes,
    }
    changed = list(words)
    for place, word in enumerate(words):
        if word in small:
            changed[place + 1] = str(small[word])
    return changed


def without(words: list[str], *flags: str) -> list[str]:
    """`words` without `flags` and the values behind them."""
    kept, is_left_out = [], False
    for word in words:
        if word.startswith("--"):
            is_left_out = word in flags
        if not is_left_out:
            kept.append(word)
    return kept


def shape(model_type: str, words: str, **more: Any) -> dict[str, Any]:
    """config.json as the model's publisher wrote it, from the sizes among `words`."""
    split = shlex.split(words)
    values = {SIZES[flag]: json.loads(split[place + 1]) for place, flag in enumerate(split) if flag in SIZES}
    common = {"model_type": model_type, "max_position_embeddings": 40960, "hidden_act": "silu"}
    return {**common, "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in split, **values, **more}


_QWEN3_4B_SHAPE = shape("qwen3", QWEN3_4B, rope_theta=1000000)
SCRIPTS = {
    "qwen3-4B": Script(
        source="scripts/run-qwen3-4B.sh",
        flags=f"--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {QWEN3_4B} --rotary-base 1000000 "
        f"{_CHECKPOINTS} {_ROLLOUT} --rm-type deepscaler {_ADAM} {_GRPO} --tensor-model-parallel-size 2 {_LAYOUT} "
        f"--context-parallel-size 1 --expert-model-parallel-size 1 {_RECOMPUTE} --max-tokens-per-gpu 9216 {_EVAL} "
        f"--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 {_MISC}",
        shape=_QWEN3_4B_SHAPE,
        then={},
    ),
    "qwen3-30B-A3B": Script(
        source="scripts/run-qwen3-30B-A3B.sh",
        flags=f"--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {QWEN3_30B} {_CHECKPOINTS} {_ROLLOUT} "
        f"--rm-type deepscaler {_ADAM} {' '.join(OFFLOAD)} {_GRPO} --tensor-model-parallel-size 4 {_LAYOUT} "
        f"--context-parallel-size 1 --expert-model-parallel-size 8 {_RECOMPUTE} --max-tokens-per-gpu 20480 {_EVAL} "
        "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 4 8 "
        f"{' '.join(map(str, range(16, 257, 8)))} {_MISC}",
        shape=shape("qwen3_moe", QWEN3_30B, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        then={},
    ),
    "glm4-9B": Script(
        source="scripts/run-glm4-9B.sh",
        flags=f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 {GLM4_9B} {_CHECKPOINTS} "
        f"{_ROLLOUT} --rm-type deepscaler {_ADAM} {_GRPO} --tensor-model-parallel-size 2 {_LAYOUT} "
        f"--context-parallel-size 2 --expert-model-parallel-size 1 {_RECOMPUTE} --max-tokens-per-gpu 4608 {_EVAL} "
        f"--rollout-num-gpus-per-engine 2 {_MISC}",
        shape=shape("glm4", GLM4_9B, attention_bias=True, head_dim=128, partial_rotary_factor=0.5),
        then={
            "--tensor-model-parallel-size": "--train-backend fsdp",
            "--context-parallel-size": "",
            "--sequence-parallel": "",
            "--recompute-method": "",
            "--recompute-num-layers": "",
        },
    ),
    "qwen2.5-0.5B-reproducibility": Script(
        source="scripts/run-qwen2.5-0.5B-reproducibility.sh",
        flags=f"--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --calculate-per-token-loss {QWEN25_05B} "
        "--hf-checkpoint {model} --ref-load {model} --prompt-data {data} --input-key messages --label-key label "
        "--apply-chat-template --rollout-shuffle --rm-type math --num-rollout 100 --rollout-batch-size 32 "
        "--n-samples-per-prompt 8 --rollout-max-response-len 1024 --rollout-temperature 1 --global-batch-size 256 "
        f"{_ADAM} {_GRPO} --kl-coef 0.00 --use-wandb --wandb-host https://wandb.ai/ --wandb-team glm-zero "
        "--wandb-project slime-dev --wandb-group qwen2.5-0.5B-gsm8k-deterministic --tensor-model-parallel-size 1 "
        f"{_LAYOUT} --context-parallel-size 1 --expert-model-parallel-size 1 --use-dynamic-batch-size "
        "--max-tokens-per-gpu 9216 --eval-interval 20 --eval-prompt-data gsm8k {eval} --n-samples-per-eval-prompt 1 "
        "--eval-max-response-len 1024 --eval-top-k 1 --rollout-num-gpus-per-engine 1 "
        "--sglang-mem-fraction-static 0.7 --sglang-enable-deterministic-inference "
        f"--sglang-attention-backend flashinfer --deterministic-mode {_MISC}",
        shape=shape("qwen2", QWEN25_05B),
        then={
            "--vllm-enable-deterministic-inference": "",
            "--deterministic-mode": "",
        },
    ),
    "fully-async-qwen2.5-0.5B": Script(
        source="examples/fully_async/run-qwen2.5-0.5B-fully_async.sh",
        program="train_async.py",
        flags=f"--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 3 {QWEN25_05B} "
        "--hf-checkpoint {model} --ref-load {model} --save {out} --save-interval 9999 "
        "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async --prompt-data {data} "
        "--input-key prompt --label-key label --apply-chat-template --rollout-shuffle --rm-type deepscaler "
        "--num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 1024 "
        f"--rollout-temperature 1 --global-batch-size 32 --balance-data {_ADAM} {_GRPO} "
        f"--tensor-model-parallel-size 1 {_LAYOUT} --context-parallel-size 1 --expert-model-parallel-size 1 "
        "--use-dynamic-batch-size --max-tokens-per-gpu 4096 --rollout-num-gpus-per-engine 1 "
        f"--sglang-mem-fraction-static 0.55 {_MISC}",
        shape=shape("qwen2", QWEN25_05B),
        then={"--rollout-function-path": "--transferqueue-mode streaming --max-staleness 1"},
    ),
    "retool-qwen3-4B": Script(
        source="examples/retool/retool_qwen3_4b_rl.sh",
        flags=f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate {QWEN3_4B} --hf-checkpoint {{model}} "
        f"--ref-load {{model}} --save {{out}} --save-interval 20 --rotary-base 5000000 {_ROLLOUT} --reward-key score "
        f"{_ADAM} {_GRPO} --use-wandb --wandb-project slime-dapo --wandb-group qwen3-4B-test-multi-turn "
        f"--wandb-key KEY --tensor-model-parallel-size 2 {_LAYOUT} --context-parallel-size 1 "
        f"--expert-model-parallel-size 1 {_RECOMPUTE} --max-tokens-per-gpu 9216 {_EVAL} "
        f"--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 {_MISC} "
        "--custom-generate-function-path {plugin}:generate --custom-rm-path {plugin}:reward_func",
        shape={**_QWEN3_4B_SHAPE, "rope_theta": 5000000},
        then={},
    ),
    "search-r1-qwen2.5-3B": Script(
        source="examples/search-r1/run_qwen2.5_3B.sh",
        flags=f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --colocate {QWEN25_3B} "
        "--hf-checkpoint {model} --ref-load {model} --prompt-data {data} --input-key prompt --label-key reward_model "
        "--apply-chat-template --rollout-shuffle --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 "
        "--rollout-max-response-len 512 --rollout-temperature 1 --global-batch-size 256 --balance-data "
        f"{_ADAM} {_GRPO.replace('0.00 --kl-loss-type', '0.001 --kl-loss-type')} --tensor-model-parallel-size 2 "
        f"{_LAYOUT} --context-parallel-size 1 --expert-model-parallel-size 1 {_RECOMPUTE} --max-tokens-per-gpu 9216 "
        f"--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 {_MISC} "
        "--custom-generate-function-path {plugin}:generate --custom-rm-path {plugin}:reward_func",
        shape=shape("qwen2", QWEN25_3B),
        then={},
    ),
}
