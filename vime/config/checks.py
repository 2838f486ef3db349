"""Fill what was left empty, then refuse what cannot work: both before any process starts.

`resolve` turns "auto" and empty values into the values the run will use, so that config.json in the run directory says
what happened. `check` raises ConfigError naming the flags, what was got, what is expected and the fix.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from vime.config.agent_checks import check_agents, resolve_agents
from vime.config.algo_checks import (
    check_algo,
    check_critic,
    needs_critic,
    needs_reference,
    needs_teacher,
    resolve_algo,
)
from vime.config.colocation import check_colocation, resolve_colocation, transport_in_turns
from vime.config.deadlines import request_deadline_s, rollout_deadline_s
from vime.config.eval_sets import eval_sets
from vime.config.external_engines import check_external_addresses
from vime.config.flags import knobs
from vime.config.graders import is_unscored, lack_of
from vime.config.hf_config import ModelShape, has_weights, read_model_shape
from vime.config.layout import check_layout, virtual_pipeline_size
from vime.config.lora import check_lora
from vime.config.model_files import what_is_there
from vime.config.optimizer_checks import check_optimizer
from vime.config.parse import SECTIONS, Config
from vime.config.paths import EXPECTED_PROMPTS, absolute_paths, prompt_files
from vime.config.problems import Problems
from vime.config.queue_checks import check_queue, default_round_order
from vime.config.reference_checks import check_reference_mode
from vime.config.schedule import check_schedule
from vime.types import ConfigError
from vime.utils.device import has_cuda

TEACHER_COLUMN, ROUTING_COLUMN = "teacher_log_probs", "rollout_routed_experts"
LAST_PORT = 65_535
FP32_THRESHOLD, BF16_THRESHOLD, BF16_EXPERTS_THRESHOLD = 1e-4, 6e-2, 0.1
"""Defaults of --train-rollout-diff-threshold: in fp32, in bf16 without experts, in bf16 with experts."""


def resolve(given: Config, problems: Problems | None = None) -> Config:
    """Fill in derived defaults and absolute paths. Contradictions that make a default impossible are added to
    `problems`, with a placeholder so that the rest can be checked; without `problems` they are raised."""
    found = Problems() if problems is None else problems
    config = absolute_paths(given)
    resolved = _with_deadlines(_derive(config, found))
    if problems is None:
        found.raise_all()
    derived = tuple(
        (spec.name, value)
        for name, section in SECTIONS.items()
        for _, spec in knobs(section)
        if (value := getattr(getattr(resolved, name), spec.name)) != getattr(getattr(config, name), spec.name)
    )
    return dataclasses.replace(resolved, derived=derived)


def _derive(config: Config, found: Problems) -> Config:
    cluster, rollout, batch, queue = config.cluster, config.rollout, config.batch, config.queue
    device = cluster.device if cluster.device != "auto" else ("cuda" if has_cuda() else "cpu")
    on_cuda = device == "cuda"
    config = config.replace(
        device=device,
        actor_num_gpus_per_node=cluster.actor_num_gpus_per_node or (8 if on_cuda else 1),
        **_resolve_precision(config, on_cuda=on_cuda),
    )
    config = config.replace(**resolve_colocation(config))
    cluster = config.cluster
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    num_engines = cluster.rollout_num_engines
    if num_engines is None and cluster.rollout_external_engine_addrs:
        num_engines = len(cluster.rollout_external_engine_addrs)
    if num_engines is None:
        gpus = cluster.rollout_num_gpus or cluster.rollout_num_gpus_per_engine
        num_engines = max(1, gpus // cluster.rollout_num_gpus_per_engine) if on_cuda else 1
    staleness = queue.transferqueue_max_staleness
    mode = found.attempt(_resolve_mode, config, otherwise="off")
    untold: dict[str, float | str] = {}
    one_step = {"global_batch_size": samples, "num_steps_per_rollout": 1}
    return config.replace(
        distributed_backend=cluster.distributed_backend or ("nccl" if on_cuda else "gloo"),
        rollout_num_engines=num_engines,
        rollout_num_gpus=cluster.rollout_num_gpus or num_engines * cluster.rollout_num_gpus_per_engine,
        over_sampling_batch_size=rollout.over_sampling_batch_size or rollout.rollout_batch_size,
        **resolve_agents(config, num_engines),
        transferqueue_mode=mode,
        transferqueue_round_order=queue.transferqueue_round_order or default_round_order(queue),
        mixed_version_policy=queue.mixed_version_policy
        or ("mask" if rollout.mask_offpolicy_in_partial_rollout else "correct"),
        transfer_queue_extra_data_fields=_resolve_columns(config),
        **resolve_algo(config.algo, max_staleness=staleness),
        critic_lr=_resolve_critic_lr(config),
        **found.attempt(_resolve_agreement, config, otherwise=untold),
        virtual_pipeline_model_parallel_size=found.attempt(_resolve_chunks, config, otherwise=None),
        pause_mode=config.weights.pause_mode or ("keep" if staleness > 0 else "wait"),
        update_weight_transport=found.attempt(_resolve_transport, config, device, otherwise="shm"),
        **found.attempt(
            _resolve_batch, batch.global_batch_size, batch.num_steps_per_rollout, samples, otherwise=one_step
        ),
    )


def _with_deadlines(config: Config) -> Config:
    """Fill in the deadlines that grow with answers. An --eval-config that cannot be read is refused by `_check_eval`:
    until then they stay empty."""
    try:
        return config.replace(
            generate_timeout_secs=request_deadline_s(config), rollout_timeout_secs=rollout_deadline_s(config)
        )
    except ConfigError:
        return config


def _resolve_precision(config: Config, *, on_cuda: bool) -> dict[str, bool]:
    """On GPUs choose bf16 and a sharded optimizer, like slime and verl: in fp32 the models would not fit, and GPU
    attention kernels do not exist. Torch's product for all experts has a kernel of its own in bf16 on GPUs only. What
    cannot have an effect is off."""
    parallel, is_megatron = config.parallel, config.cluster.train_backend == "megatron"
    sharded, groups = parallel.use_distributed_optimizer, parallel.moe_grouped_gemm
    bf16 = on_cuda if parallel.bf16 is None else parallel.bf16
    return {
        "bf16": bf16,
        "moe_grouped_gemm": (on_cuda and is_megatron and bf16) if groups is None else groups,
        "use_distributed_optimizer": (on_cuda and is_megatron) if sharded is None else sharded,
        "sequence_parallel": parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
    }


def differences(given: Config, config: Config) -> list[str]:
    """Return notes on what differs from the meaning of the same flags in slime or megatron."""
    was, now = given.parallel, config.parallel
    lines = []
    if config.cluster.device == "cuda" and was.bf16 is None:
        lines.append("--bf16 is the default on cuda: parameters and activations in bf16. --no-bf16 computes in fp32.")
    if now.use_distributed_optimizer and was.use_distributed_optimizer is None:
        lines.append("--use-distributed-optimizer is the default on cuda; --no-use-distributed-optimizer is the other.")
    if was.sequence_parallel and not now.sequence_parallel:
        lines.append("--sequence-parallel changes nothing at --tensor-model-parallel-size 1.")
    if given.engine.vllm_router_policy is None and config.engine.vllm_router_policy == "consistent_hash":
        lines.append(
            "--vllm-router-policy consistent_hash is the default with an agent and several engines: all turns of a "
            "session reach one engine, which has their beginning cached."
        )
    if config.algo.use_kl_loss and config.algo.kl_loss_coef == 0:
        lines.append(
            "--use-kl-loss with --kl-loss-coef 0 only measures train/kl_loss, and costs a pass of the reference model "
            "per round. Remove --use-kl-loss if you do not need it."
        )
    return lines


def _resolve_chunks(config: Config) -> int | None:
    parallel = config.parallel
    if parallel.num_layers_per_virtual_pipeline_stage is None:
        return parallel.virtual_pipeline_model_parallel_size
    return virtual_pipeline_size(parallel, read_model_shape(config.model.hf_checkpoint).num_layers)


def _resolve_critic_lr(config: Config) -> float | None:
    is_empty = config.critic.critic_lr is None and needs_critic(config.algo)
    return config.optimizer.lr if is_empty else config.critic.critic_lr


def _resolve_mode(config: Config) -> str:
    queue = config.queue
    if queue.transferqueue_mode is None:
        return "buffer" if queue.enable_vime_transfer_queue else "off"
    if queue.transferqueue_mode == "off" and queue.enable_vime_transfer_queue:
        raise ConfigError("--enable-vime-transfer-queue contradicts --transferqueue-mode off. Remove one of the two.")
    return queue.transferqueue_mode


def _resolve_columns(config: Config) -> tuple[str, ...]:
    """Return the optional columns asked for, and those that routing replay and --use-opd without --opd-teacher-load
    read."""
    names, algo = config.queue.transfer_queue_extra_data_fields, config.algo
    read = {
        TEACHER_COLUMN: algo.use_opd and not needs_teacher(algo),
        ROUTING_COLUMN: algo.use_rollout_routing_replay,
    }
    return (*names, *(name for name, is_read in read.items() if is_read and name not in names))


def _resolve_agreement(config: Config) -> dict[str, float | str]:
    """Fill in the threshold and what happens above it. Measured in fp32: at most 1.1e-5 on the CPU, 2.2e-5 for 135M
    parameters. In bf16 means of 0.005 to 0.044, of which those of experts move most from round to round
    (docs/agreement.md)."""
    agreement = config.agreement
    threshold, action = agreement.train_rollout_diff_threshold, agreement.on_train_rollout_diff
    debug = config.debug
    is_sampled_elsewhere = config.algo.loss_type == "sft_loss" or bool(
        debug.load_debug_rollout_data or debug.debug_engine_module
    )
    if config.debug.debug_rollout_only and (action, threshold) != (None, None):
        raise ConfigError(
            "--train-rollout-diff-threshold and --on-train-rollout-diff with --debug-rollout-only have no effect: no "
            "trainer is there to agree with. Remove them."
        )
    if action is None:
        action = "ignore" if is_sampled_elsewhere and threshold is None else "warn"
    elif action == "ignore" and threshold is not None:
        raise ConfigError(
            f"--train-rollout-diff-threshold {threshold:g} with --on-train-rollout-diff ignore has no effect. Keep one "
            "of the two."
        )
    if action != "ignore" and config.algo.loss_type == "sft_loss":
        raise ConfigError(
            "--train-rollout-diff-threshold and --on-train-rollout-diff: completions of --loss-type sft_loss carry no "
            "log-probabilities of an engine. Remove the flag."
        )
    return {
        "train_rollout_diff_threshold": _usual_threshold(config) if threshold is None else threshold,
        "on_train_rollout_diff": action,
    }


def _usual_threshold(config: Config) -> float:
    """Return the default by precision and experts. A model that cannot be read is refused by `_check_model`: until then
    it has no experts."""
    if not config.parallel.bf16:
        return FP32_THRESHOLD
    try:
        has_experts = read_model_shape(config.model.hf_checkpoint).num_experts > 0
    except ConfigError:
        has_experts = False
    return BF16_EXPERTS_THRESHOLD if has_experts else BF16_THRESHOLD


def _resolve_transport(config: Config, device: str) -> str:
    chosen = config.weights.update_weight_transport
    if chosen == "auto" and config.cluster.colocate:
        return transport_in_turns(config)
    if chosen == "auto":
        return "nccl" if device == "cuda" else "shm" if config.cluster.ray_address is None else "gloo"
    if chosen == "nccl" and device == "cpu":
        raise ConfigError("--update-weight-transport nccl needs --device cuda, got cpu. Use shm, gloo or disk.")
    return chosen


def _resolve_batch(global_batch: int | None, num_steps: int | None, samples: int) -> dict[str, int]:
    """global_batch_size * num_steps_per_rollout must be the samples of a round."""
    if global_batch is None:
        steps = num_steps or 1
        if samples % steps:
            raise ConfigError(
                f"--num-steps-per-rollout {steps} does not divide the {samples} samples of a round "
                "(--rollout-batch-size x --n-samples-per-prompt). Choose a divisor."
            )
        return {"global_batch_size": samples // steps, "num_steps_per_rollout": steps}
    steps = num_steps or max(1, samples // global_batch)
    if global_batch * steps != samples:
        raise ConfigError(
            f"--global-batch-size {global_batch} x {steps} optimizer steps is {global_batch * steps} samples, but a "
            f"round has {samples} (--rollout-batch-size x --n-samples-per-prompt). Make them equal."
        )
    return {"global_batch_size": global_batch, "num_steps_per_rollout": steps}


def check(config: Config, problems: Problems | None = None) -> None:
    """Make every check that needs no process. Called once, after `resolve`. All are made, also after a refusal."""
    found = Problems() if problems is None else problems
    for one in _CHECKS:
        with found.gathering():
            one(config)
    with found.gathering():
        shape = _check_model(config)
        for of_model in (check_layout, _check_routing_replay, _check_lengths):
            with found.gathering():
                of_model(config, shape)
    if problems is None:
        found.raise_all()


def _check_devices(config: Config) -> None:
    if config.rollout.rollout_backend != "vllm":
        raise ConfigError(
            f"--rollout-backend {config.rollout.rollout_backend}: only vllm is supported. Remove the flag."
        )
    if config.cluster.device == "cpu" and config.cluster.distributed_backend == "nccl":
        raise ConfigError("--distributed-backend nccl needs --device cuda, got cpu. Use gloo, or remove the flag.")
    if config.cluster.device == "cuda" and not has_cuda() and config.cluster.ray_address is None:
        raise ConfigError(
            "--device cuda: this machine shows no CUDA device. Use --device cpu, or --ray-address of a cluster that "
            "has some."
        )


def _check_algorithm(config: Config) -> None:
    check_algo(
        config.algo,
        max_staleness=config.queue.transferqueue_max_staleness,
        group_size=config.rollout.n_samples_per_prompt,
    )


def _check_critic(config: Config) -> None:
    check_critic(config.critic, algo=config.algo, optimizer=config.optimizer, num_rollout=config.rollout.num_rollout)


def _check_model(config: Config) -> ModelShape:
    model = config.model
    if not model.hf_checkpoint:
        raise ConfigError("--hf-checkpoint is not given: expected a Hugging Face model directory. Name one.")
    shape = read_model_shape(model.hf_checkpoint)
    for flag, directory in (
        ("--hf-checkpoint", model.hf_checkpoint),
        ("--ref-load", model.ref_load),
        ("--opd-teacher-load", config.algo.opd_teacher_load),
        ("--critic-load", config.critic.critic_load),
    ):
        if directory and not has_weights(directory):
            raise ConfigError(
                f"{flag} {directory}: no *.safetensors there. {what_is_there(directory)}Expected Hugging Face weights; "
                "check the path."
            )
    if config.parallel.transformer_impl == "transformer_engine" and config.cluster.device != "cuda":
        raise ConfigError("--transformer-impl transformer_engine needs --device cuda. Use --transformer-impl local.")
    return shape


def _check_processes(config: Config) -> None:
    """Refuse separate roles that the run has no model for, and offloading where nothing else uses the device."""
    cluster, debug = config.cluster, config.debug
    algo = config.algo
    is_played = {"reference": needs_reference(algo), "critic": needs_critic(algo), "teacher": needs_teacher(algo)}
    makers = {
        "reference": "--use-kl-loss or --kl-coef",
        "critic": "--advantage-estimator ppo",
        "teacher": "--use-opd with --opd-teacher-load",
    }
    for role in cluster.separate_roles:
        if not is_played[role]:
            raise ConfigError(
                f"--separate-roles {role} has no effect: this run has no {role} model ({makers[role]} makes one). "
                "Remove it."
            )
    for flag, is_given in (
        ("--separate-roles", bool(cluster.separate_roles)),
        ("--offload-train", cluster.offload_train and not cluster.colocate),
    ):
        if is_given and debug.debug_rollout_only:
            raise ConfigError(f"{flag} with --debug-rollout-only has no effect: no trainer starts. Remove one.")
    if cluster.offload_train and debug.debug_train_only and not cluster.colocate:
        raise ConfigError(
            "--offload-train with --debug-train-only has no effect: no engine starts, so the trainer never waits. "
            "Remove one of the two."
        )


def _check_routing_replay(config: Config, shape: ModelShape) -> None:
    if not config.algo.use_rollout_routing_replay:
        return
    if shape.num_experts == 0:
        raise ConfigError("--use-rollout-routing-replay: the model of --hf-checkpoint has no experts. Remove the flag.")
    if shape.model_type == "deepseek_v3":
        raise ConfigError(
            "--use-rollout-routing-replay: the model of --hf-checkpoint has layers without experts (model_type "
            "deepseek_v3), of which a replay says nothing. Expected experts in each layer. Remove the flag."
        )
    if shape.model_type == "gpt_oss":
        raise ConfigError(
            "--use-rollout-routing-replay: the model of --hf-checkpoint has stacked experts (model_type gpt_oss), "
            "whose replay no test compares with transformers. Expected another family. Remove the flag."
        )
    if config.cluster.train_backend == "fsdp":
        raise ConfigError("--use-rollout-routing-replay needs --train-backend megatron. Change it, or remove the flag.")
    rollout = config.rollout
    is_told_by_plugin = (
        rollout.custom_generate_function_path
        or not rollout.rollout_function_path.startswith("vime.rollout.vllm_rollout.")
        or config.debug.load_debug_rollout_data
    )
    if config.cluster.device == "cpu" and not is_told_by_plugin:
        raise ConfigError(
            "--use-rollout-routing-replay with --device cpu: vLLM on the CPU does not report which experts it chose "
            "(that needs its model runner V2, which needs Triton). Remove the flag, or give a "
            "--custom-generate-function-path that sets sample.rollout_routed_experts."
        )


def _check_lengths(config: Config, shape: ModelShape) -> None:
    rollout = config.rollout
    positions = shape.max_position_embeddings
    context = rollout.rollout_max_context_len or positions
    if not context:
        raise ConfigError(
            f"--rollout-max-context-len is not given, and config.json of model_type {shape.model_type} does not say "
            "how many positions the model has. Add --rollout-max-context-len TOKENS, prompt and completion together."
        )
    if positions and context > positions:
        raise ConfigError(f"--rollout-max-context-len {context} is beyond the model's {positions} positions. Lower it.")
    if rollout.rollout_max_response_len >= context:
        raise ConfigError(
            f"--rollout-max-response-len {rollout.rollout_max_response_len} leaves no token for a prompt in a context "
            f"of {context} tokens. Lower it, or raise --rollout-max-context-len."
        )
    if (rollout.over_sampling_batch_size or 0) < rollout.rollout_batch_size:
        raise ConfigError(
            f"--over-sampling-batch-size {rollout.over_sampling_batch_size} is below --rollout-batch-size "
            f"{rollout.rollout_batch_size}. Expected at least as many."
        )


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.rollout_top_k == 0:
        raise ConfigError("--rollout-top-k 0 samples nothing. Use -1 for all tokens, or at least 1.")
    if rollout.rollout_temperature == 0:
        raise ConfigError("--rollout-temperature 0 gives equal answers and no learning signal. Use a value above 0.")
    if rollout.rollout_top_p < 1 or rollout.rollout_top_k > 0:
        raise ConfigError(
            f"--rollout-top-p {rollout.rollout_top_p} / --rollout-top-k {rollout.rollout_top_k}: training on truncated "
            "sampling needs the kept set of every token, which this release does not record, so the policy ratio "
            "would be biased. Use --rollout-top-p 1 --rollout-top-k -1 (evaluation may truncate: --eval-top-p)."
        )
    if "" in rollout.rollout_stop:
        raise ConfigError("--rollout-stop: got an empty text, which ends no completion. Expected text. Remove it.")


def _check_rounds(config: Config) -> None:
    rollout = config.rollout
    if rollout.num_rollout is None and rollout.num_epoch is None:
        raise ConfigError("neither --num-rollout nor --num-epoch is given. Say how long to train.")
    if rollout.num_rollout is not None and rollout.num_epoch is not None:
        raise ConfigError("--num-rollout and --num-epoch are both given. Keep one of the two.")
    staleness, interval = config.queue.transferqueue_max_staleness, config.weights.update_weights_interval
    if interval > staleness + 1:
        raise ConfigError(
            f"--update-weights-interval {interval} makes rollouts up to {interval - 1} version(s) old, but "
            f"--transferqueue-max-staleness is {staleness}. Raise it to {interval - 1} or update more often."
        )


def _check_rewards(config: Config) -> None:
    reward = config.reward
    may_be_in_records = config.data.prompt_data is not None and _default_source(config)
    if is_unscored(config) and not may_be_in_records:
        raise ConfigError("no reward: give --rm-type or --custom-rm-path.")
    if reward.rm_type and reward.custom_rm_path:
        raise ConfigError("--rm-type and --custom-rm-path are both given. Keep one of the two.")
    if lack := lack_of(reward.rm_type, reward):
        raise ConfigError(f"--rm-type {reward.rm_type}, {lack}.")


def _check_eval(config: Config) -> None:
    pairs = config.eval.eval_prompt_data
    if len(pairs) % 2:
        raise ConfigError(f"--eval-prompt-data {' '.join(pairs)}: expected NAME PATH pairs. Give each file a name.")
    for one in eval_sets(config):
        if not prompt_files(one.path.split("@[")[0]):
            raise ConfigError(f"{one.flag}: no such file: {one.path} (set {one.name}). {EXPECTED_PROMPTS}")
        if one.config.eval.eval_top_p == 0:
            raise ConfigError(
                f"{one.flag}: set {one.name} has --eval-top-p 0 (top_p), which samples nothing. Expected above 0 and "
                "at most 1; --eval-temperature 0 takes the likeliest token."
            )
        own = one.config.reward
        if own != config.reward and (lack := lack_of(own.rm_type, own)):
            raise ConfigError(f"{one.flag}: set {one.name} has rm_type {own.rm_type}, {lack}.")
    data = config.data
    replayed = config.debug.load_debug_rollout_data is not None
    if data.prompt_data is None and data.reasoning_gym is None and not replayed and _default_source(config):
        raise ConfigError("no prompts: give --prompt-data FILE or --reasoning-gym TASKS.")
    if data.prompt_data is not None and not prompt_files(data.prompt_data.split("@[")[0]):
        raise ConfigError(f"--prompt-data {data.prompt_data}: no such file. {EXPECTED_PROMPTS}")


def _check_idle(config: Config) -> None:
    """Refuse flags that contradict another one, or that nothing reads yet. `readers.py` has the rest."""
    cluster = config.cluster
    engines, size = cluster.num_engines, cluster.rollout_num_gpus_per_engine
    check_external_addresses(config)
    if cluster.rollout_num_gpus not in (None, engines * size):
        raise ConfigError(
            f"--rollout-num-gpus {cluster.rollout_num_gpus}: {engines} engine(s) of --rollout-num-gpus-per-engine "
            f"{size} use {engines * size}. Make them agree; on the CPU use --rollout-num-engines alone."
        )
    if cluster.device == "cpu" and size > 1:
        raise ConfigError(f"--rollout-num-gpus-per-engine {size}: an engine on the CPU has one worker. Remove it.")
    if config.data.prompt_data is not None and config.data.reasoning_gym is not None:
        raise ConfigError("--prompt-data and --reasoning-gym are both given. Keep one of the two.")
    if config.engine.vllm_router_ip is not None:
        raise ConfigError(
            f"--vllm-router-ip {config.engine.vllm_router_ip}: a router of your own cannot be used yet; Vime starts "
            "one in front of its engines and fills this in. Remove the flag."
        )
    router_ports = config.engine.router_ports
    if router_ports and router_ports[-1] > LAST_PORT:
        count = len(router_ports)
        raise ConfigError(
            f"--vllm-router-port {router_ports[0]} with --vllm-router-count {count}: the routers would have ports up "
            f"to {router_ports[-1]}, expected at most {LAST_PORT}. Choose a port of at most {LAST_PORT - count + 1}."
        )


def _default_source(config: Config) -> bool:
    return config.data.data_source_path.startswith("vime.rollout.data_source.")


def _check_debug(config: Config) -> None:
    debug = config.debug
    if debug.debug_rollout_only and debug.debug_train_only:
        raise ConfigError("--debug-rollout-only and --debug-train-only leave nothing to run. Keep one of the two.")
    needs_engine = config.rollout.rollout_function_path.startswith("vime.rollout.vllm_rollout.")
    if debug.debug_train_only and needs_engine and not debug.load_debug_rollout_data:
        raise ConfigError(
            "--debug-train-only needs --load-debug-rollout-data PATH_{rollout_id}.jsonl, or a --rollout-function-path "
            "that uses no engine."
        )
    if debug.debug_engine_module and (config.cluster.device != "cpu" or debug.debug_train_only):
        why = "no engine starts" if debug.debug_train_only else "it is for --device cpu"
        raise ConfigError(f"--debug-engine-module {debug.debug_engine_module}: {why}. Remove it.")
    if debug.load_debug_rollout_data and debug.debug_rollout_only:
        raise ConfigError(
            "--debug-rollout-only with --load-debug-rollout-data: nothing would be generated and nothing trained. Keep "
            "one of the two."
        )
    if debug.load_debug_rollout_data and config.rollout.num_rollout is None:
        raise ConfigError(
            "--num-epoch with --load-debug-rollout-data: recorded rounds have no epochs. Give --num-rollout instead."
        )
    if debug.debug_train_only and config.eval.has_sets:
        raise ConfigError(
            "--eval-prompt-data or --eval-config with --debug-train-only: without engines nothing can be evaluated. "
            "Remove one."
        )
    if debug.load_debug_rollout_data and config.queue.transferqueue_mode != "off":
        raise ConfigError(
            f"--transferqueue-mode {config.queue.transferqueue_mode} with --load-debug-rollout-data: replayed rounds "
            "are trained without the queue. Use --transferqueue-mode off."
        )


def _check_templates(config: Config) -> None:
    """Check that paths with one file or directory per round say where the round's number goes."""
    for flag, value in (
        ("--save-hf", config.model.save_hf),
        ("--save-debug-rollout-data", config.debug.save_debug_rollout_data),
        ("--load-debug-rollout-data", config.debug.load_debug_rollout_data),
    ):
        if value is not None and "{rollout_id}" not in value:
            raise ConfigError(f"{flag} {value}: expected {{rollout_id}} in the path, one per round.")
        try:
            _ = (value or "").format(rollout_id=0)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{flag} {value}: {{rollout_id}} is the only field, got another ({error}). Write other braces twice."
            ) from error
    if config.model.save_hf and not config.model.save_interval:
        raise ConfigError("--save-hf exports with checkpoints and needs --save-interval ROUNDS. Add it.")
    if config.model.async_save and config.cluster.train_backend == "fsdp":
        raise ConfigError("--async-save with --train-backend fsdp has no effect: it writes at once. Remove the flag.")
    if config.data.apply_chat_template_kwargs is not None:
        try:
            parsed = json.loads(config.data.apply_chat_template_kwargs)
        except ValueError as error:
            raise ConfigError(f"--apply-chat-template-kwargs: not JSON: {error}.") from error
        if not isinstance(parsed, dict):
            raise ConfigError(f"--apply-chat-template-kwargs: expected a JSON object, got {type(parsed).__name__}.")


_CHECKS: tuple[Callable[[Config], None], ...] = (
    _check_devices,
    _check_rounds,
    check_queue,
    check_schedule,
    _check_sampling,
    _check_rewards,
    _check_algorithm,
    _check_processes,
    check_colocation,
    _check_critic,
    lambda config: check_lora(config.lora),
    _check_eval,
    _check_idle,
    _check_debug,
    check_reference_mode,
    check_optimizer,
    _check_templates,
    check_agents,
)
