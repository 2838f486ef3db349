"""Refusals that need more than the command line, still before any process starts."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from vime.backends.megatron_utils.architecture import check_implementation, read_architecture
from vime.backends.megatron_utils.lora_layers import check_adapter
from vime.backends.vllm_utils.external import check_external
from vime.backends.vllm_utils.launch import validate_vllm_flags
from vime.backends.vllm_utils.router import validate_router_flags
from vime.config.agent_checks import host_and_port
from vime.config.command_line import parse_command_line
from vime.config.eval_sets import eval_sets
from vime.config.hf_config import VISION_FAMILIES, has_latent_attention, num_tokenizer_ids, read_record
from vime.config.layout import check_model_layout, idle_under_fsdp
from vime.config.lora import LINEAR_LAYERS
from vime.config.model_files import read_headers
from vime.config.parse import Config, parse_readable
from vime.config.paths import absolute_paths
from vime.config.queue_checks import EXTERNAL, STREAMING
from vime.data.columns import check_requested
from vime.handoff.ledger_types import LEDGER_NAME
from vime.handoff.ledger_undo import lasting_file
from vime.handoff.spool import Fsync
from vime.handoff.spool_check import check_spool
from vime.ray.checkpoint import LEDGER_RUN, find_latest, find_start, read_run_state
from vime.ray.checkpoint_damage import refuse_damage
from vime.ray.checkpoint_identity import refuse_other_run
from vime.ray.dry_run import dry_run, ranks_per_node
from vime.ray.foreign_checkpoint import refuse_foreign
from vime.ray.inputs import Refusals, check_inputs
from vime.ray.ledger_choice import choose_ledger
from vime.rollout.plugins import check_plugins
from vime.rollout.record import check_recorded
from vime.sessions.key_file import agent_key
from vime.training.roles import engine_spec, needed_roles
from vime.types import ConfigError, EngineSpec, VimeError
from vime.utils.failpoints import check_armed
from vime.utils.network import LOOPBACK, port_is_free

GIB = 2**30
TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")  # Python, and what is compiled for torch
DRY_RUN_S = 120.0


def preflight(config: Config, *, is_async: bool) -> None:
    """Check the schedule's demand on staleness, ports, --load, its ledger, columns, plug-ins, the model's architecture
    and flags of vLLM. All that they find is one refusal."""
    refusals = Refusals()
    look_ahead(config, refusals, is_async=is_async)
    refusals.raise_all()


def look_ahead(config: Config, refusals: Refusals, *, is_async: bool) -> None:
    """Like `preflight`, but the caller collects the refusals."""
    refusals.attempt(_check_failpoints)
    if is_async:
        refusals.attempt(_check_prefetch, config)
    refusals.attempt(_check_ports, config.engine.router_ports)
    refusals.attempt(_check_gateway, config)
    refusals.attempt(_check_agent_port, config)
    refusals.attempt(_check_address, config.reward.rm_url)
    refusals.attempt(_check_resumed, config)
    refusals.attempt(_check_place, "--save-hf", config.model.save_hf)
    refusals.attempt(_check_place, "--save-debug-rollout-data", config.debug.save_debug_rollout_data)
    refusals.attempt(_check_engine_module, config.debug.debug_engine_module)
    refusals.attempt(check_requested, config.queue.transfer_queue_extra_data_fields)
    refusals.attempt(check_plugins, config.flat)
    for one in eval_sets(config):
        refusals.attempt(check_plugins, one.config.flat)
    refusals.attempt(_check_images, config)
    if not config.debug.debug_rollout_only:
        refusals.attempt(_check_adapter, config)
        refusals.attempt(_check_transformer_engine, config)
        refusals.attempt(_check_architecture, config)
        refusals.attempt(check_memory, config)
    refusals.attempt(validate_router_flags, config)
    refusals.attempt(validate_vllm_flags, config)
    refusals.attempt(check_external, config)
    refusals.attempt(_check_latent_attention, config)


def read_command_line(argv: Sequence[str] | None = None, *, is_async: bool, program: str = "train.py") -> Config:
    """Return the configuration of a run that may start: every flag, file and plug-in was checked, and no process
    started.

    Raises one VimeError that names everything that is wrong. When flags contradict each other, files and records are
    still checked, because that needs no derived default."""
    refusals, found = Refusals(), []
    refusals.attempt(lambda: found.append(parse_command_line(argv, program=program)))
    if found:
        config = found[0]
        look_ahead(config, refusals, is_async=is_async)
        check_inputs(config, refusals)
    else:
        with contextlib.suppress(VimeError):  # reported above
            given, unread = parse_readable(sys.argv[1:] if argv is None else argv)
            given, of_files = absolute_paths(given), Refusals()
            check_inputs(given, of_files)
            of_files.attempt(check_plugins, given.flat)
            refusals.add_of(of_files, not_about=unread)
    refusals.raise_all()
    return config


def _check_ports(ports: range) -> None:
    for port in ports:
        if not port_is_free(LOOPBACK, port):
            of_several = f" (--vllm-router-count {len(ports)}: {ports[0]} to {ports[-1]})" if len(ports) > 1 else ""
            raise ConfigError(
                f"--vllm-router-port {port}{of_several} is in use on this machine. Choose another or leave it out."
            )


def _check_gateway(config: Config) -> None:
    """Check that the gateway of mode external can listen, and has its certificate."""
    queue = config.queue
    if queue.transferqueue_mode != EXTERNAL:
        return
    host, _, port = queue.transferqueue_address.rpartition(":")
    if port != "0" and not port_is_free(host.strip("[]"), int(port)):
        raise ConfigError(
            f"--transferqueue-address {queue.transferqueue_address}: cannot be listened on; expected a free port of an "
            "address of this machine. Choose another, or port 0."
        )
    for flag, path in (
        ("--transferqueue-tls-cert", queue.transferqueue_tls_cert),
        ("--transferqueue-tls-key", queue.transferqueue_tls_key),
    ):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{flag} {path}: there is no such file. Expected one in PEM; check the path.")


def _check_agent_port(config: Config) -> None:
    """Check that a run on this machine can listen for agents, and the file of their key if there is one."""
    agents = config.agents
    if agents.agent_listen is None:
        return
    host, port = host_and_port(agents.agent_listen)
    if config.cluster.ray_address is None and not port_is_free(host, port):
        raise ConfigError(
            f"--agent-listen {agents.agent_listen}: cannot be listened on; expected a free port of an address of this "
            "machine. Choose another."
        )
    path = None if agents.agent_key_file is None else Path(agents.agent_key_file)
    if path is not None and path.exists():
        agent_key(path)
    elif path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"--agent-key-file {path}: there is no directory {path.parent} to make it in. Check the path."
        )


def _check_address(url: str | None) -> None:
    if url is not None and not re.match(r"https?://[^/\s]", url):
        raise ConfigError(f"--rm-url {url}: expected http://HOST:PORT/PATH or https://.... Write the whole address.")


def _check_place(flag: str, template: str | None) -> None:
    """Check outputs that are first written after a round was trained, so that they do not fail then. --run-dir and
    --save need no check: they are made and locked before anything starts."""
    if template is None:
        return
    place = Path(template.format(rollout_id=0)).absolute().parent
    try:
        with tempfile.TemporaryFile(dir=next(above for above in (place, *place.parents) if above.exists())):
            return
    except OSError as error:
        raise ConfigError(
            f"{flag} {template}: cannot be written: {error}. Expected a place for directories; choose another."
        ) from error


def _check_resumed(config: Config) -> None:
    """Check the checkpoint first, because it says which ledger to look for."""
    _check_load(config)
    _check_ledger(config)
    _check_replayed(config)


def _check_replayed(config: Config) -> None:
    """Check that the first round to replay was recorded."""
    template, first = config.debug.load_debug_rollout_data, find_start(config.model.load).rollout_id
    if template is not None and first < (config.rollout.num_rollout or 0):
        check_recorded(Path(template.format(rollout_id=first)))


def _check_failpoints() -> None:
    try:
        check_armed()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_engine_module(name: str | None) -> None:
    try:
        is_there = name is None or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        is_there = False
    if not is_there:
        raise ConfigError(f"--debug-engine-module {name}: there is no such module. Check the name and PYTHONPATH.")


def _check_adapter(config: Config) -> None:
    """Refuse what cannot train an adapter, and a base that is not what its numbers say."""
    if not config.lora.trains_adapter:
        return
    where = f"--lora-rank {config.lora.lora_rank}"
    if "quantization_config" in read_record(config.model.hf_checkpoint):
        raise ConfigError(
            f"{where}: --hf-checkpoint {config.model.hf_checkpoint} is quantised (quantization_config in its "
            "config.json), and adapters of such a base (QLoRA) are not trained. Give the model in bf16 or fp32."
        )
    if read_record(config.model.hf_checkpoint).get("model_type") in VISION_FAMILIES:
        raise ConfigError(
            f"{where}: --hf-checkpoint {config.model.hf_checkpoint} is a vision model, whose tower and text have "
            "layers of the same names; adapters of one are not trained. Remove --lora-rank, or give a text model."
        )
    headers = read_headers(config.model.hf_checkpoint, flag="--hf-checkpoint")
    names = (name.removesuffix(".weight") for name, header in headers.items() if len(header.shape) == 2)
    there = {name.rpartition(".")[2] for name in names} & set(LINEAR_LAYERS)
    missing = [name for name in config.lora.lora_target_modules if name not in there]
    if headers and missing:
        raise ConfigError(
            f"--lora-target-modules {' '.join(missing)}: --hf-checkpoint {config.model.hf_checkpoint} has no linear "
            f"layer of this name (some models keep several in one tensor). Expected some of "
            f"{', '.join(name for name in LINEAR_LAYERS if name in there) or 'another model'}."
        )


def _check_images(config: Config) -> None:
    """Refuse images that a part of the run would not carry."""
    keys = config.data.multimodal_keys
    if keys is None:
        return
    where = f"--multimodal-keys {keys}"
    try:
        named = json.loads(keys)
    except ValueError:
        named = None
    if not isinstance(named, dict) or set(named) != {"image"} or not isinstance(named["image"], str):
        raise ConfigError(f'{where}: expected a JSON object like {{"image": "images"}}; only images are read.')
    family = read_record(config.model.hf_checkpoint).get("model_type")
    if family not in VISION_FAMILIES:
        raise ConfigError(
            f"{where}: --hf-checkpoint {config.model.hf_checkpoint} has model_type {family!r}, of which Vime trains no "
            f"images; expected {' or '.join(VISION_FAMILIES)}. Give such a model, or remove the flag."
        )
    if config.cluster.train_backend == "megatron":
        raise ConfigError(f"{where}: --train-backend megatron trains no images. Expected --train-backend fsdp.")
    if config.queue.transferqueue_mode == EXTERNAL or config.agents.has_agent:
        raise ConfigError(
            f"{where}: agents, environments and external jobs get prompts as text alone. Remove the flag, or let Vime "
            "generate by itself."
        )


def _check_transformer_engine(config: Config) -> None:
    """Its torch part is compiled where it is installed, so that it may be missing where the rest of it is there. The
    nodes of a cluster are compared with this process (nodes.py)."""
    missing = [name for name in TRANSFORMER_ENGINE if importlib.util.find_spec(name) is None]
    if config.parallel.transformer_impl == "transformer_engine" and missing:
        raise ConfigError(
            f"--transformer-impl transformer_engine: {' and '.join(missing)}: not installed. Build it where nvcc and "
            "cuDNN's headers are: pip install --no-build-isolation -e '.[transformer-engine]'; or use "
            "--transformer-impl local."
        )


def _check_latent_attention(config: Config) -> None:
    """vLLM computes the latent attention of DeepSeek on a GPU in half precision only: no kernel of it takes fp32."""
    engine_is_real = config.cluster.num_started_engines > 0 and not config.debug.debug_engine_module
    if config.cluster.device != "cuda" or config.parallel.bf16 or not engine_is_real:
        return
    if has_latent_attention(config.model.hf_checkpoint):
        raise ConfigError(
            f"--no-bf16 with --device cuda: --hf-checkpoint {config.model.hf_checkpoint} has latent attention "
            "(kv_lora_rank), which vLLM does not compute in fp32 on a GPU. Use --bf16."
        )


def _check_architecture(config: Config) -> None:
    """Check that the training backend knows every model, and that it has the tokens that the policy's tokenizer
    makes."""
    policy = _vocab_size(config, config.model.hf_checkpoint, "--hf-checkpoint")
    if config.cluster.train_backend == "megatron":
        _check_implementation(config, config.model.hf_checkpoint, "--hf-checkpoint")
    if config.cluster.train_backend == "megatron" and config.lora.trains_adapter:
        architecture = read_architecture(config.model.hf_checkpoint)
        check_adapter(config.lora, config.parallel, architecture, f"--hf-checkpoint {config.model.hf_checkpoint}")
    for role in needed_roles(config):
        spec = engine_spec(role, config, total_steps=0)
        if spec.checkpoint == config.model.hf_checkpoint:
            continue
        found = _vocab_size(config, spec.checkpoint, spec.flag)
        if config.cluster.train_backend == "megatron":
            _check_cut(config, spec)
            _check_implementation(config, spec.checkpoint, spec.flag)
        if found >= policy:
            continue
        needed = num_tokenizer_ids(config.model.hf_checkpoint) or policy  # the policy's embedding may be padded
        if found < needed:
            raise ConfigError(
                f"{spec.flag} {spec.checkpoint}: the {role} model has {found} tokens, but the tokenizer of "
                f"--hf-checkpoint makes ids up to {needed - 1}; expected at least {needed} tokens. Choose a {role} of "
                "the same family."
            )


def check_memory(config: Config) -> None:
    """Check on GPUs that what the trainer ranks hold between two steps fits, and on a run's own machine what they lock
    of its memory. `vime plan` counts a step's peak too."""
    limit = config.cluster.gpu_memory_gib
    if config.cluster.device != "cuda":
        return
    try:
        parts = dry_run(config, with_passes=False, deadline_s=DRY_RUN_S)
    except ConfigError:
        return  # what the checks of the architecture say
    except VimeError as error:
        sys.stderr.write(f"note: the memory of the trainer ranks was not checked: {error}\n")
        return
    part = max(parts, key=lambda one: one.heaviest.static)
    rank = part.heaviest
    held = rank.static / GIB
    if held > limit:
        raise ConfigError(
            f"a trainer rank of stage {rank.stages[0]} ({part.name}) holds {held:.1f} GiB of weights, gradients and "
            f"optimizer state, activations not counted; expected at most --gpu-memory-gib {limit:g}. Cut the "
            "model over more ranks: `vime plan` with the same flags says how. Where a GPU has more memory, "
            "give a larger --gpu-memory-gib."
        )
    locked = ranks_per_node(config) * sum(one.heaviest.host for one in parts) / GIB
    there = psutil.virtual_memory().total / GIB
    if locked > there and config.cluster.ray_address is None:  # nodes of a cluster may be unlike this one
        raise ConfigError(
            f"--optimizer-cpu-offload: the trainer ranks lock {locked:.1f} GiB of this machine's memory for optimizer "
            f"state, and it has {there:.1f}. Lower --optimizer-offload-fraction, say --exp-avg-dtype bf16 "
            "--exp-avg-sq-dtype bf16, or train on more nodes: `vime plan` with the same flags counts it."
        )


def _check_cut(config: Config, spec: EngineSpec) -> None:
    """Check as the flags' own checks do for the policy."""
    try:
        check_model_layout(config.parallel, read_architecture(spec.checkpoint, flag=spec.flag))
    except ConfigError as error:
        raise ConfigError(f"{spec.flag} {spec.checkpoint}: {error}") from error


def _check_implementation(config: Config, checkpoint: str, flag: str) -> None:
    architecture = read_architecture(checkpoint, flag=flag)
    check_implementation(architecture, config.parallel.transformer_impl, f"{flag} {checkpoint}")


def _vocab_size(config: Config, checkpoint: str, flag: str) -> int:
    """Add to a refusal whether the other backend trains this model."""
    backends = {"megatron": _megatron_vocab_size, "fsdp": _fsdp_vocab_size}
    chosen = backends.pop(config.cluster.train_backend)
    try:
        return chosen(checkpoint, flag)
    except ConfigError as error:
        [(name, other)] = backends.items()
        try:
            other(checkpoint, flag)
        except ConfigError:
            raise error from None
        idle = idle_under_fsdp(config.parallel) if name == "fsdp" else []
        without = f" without {', '.join(idle)}" if idle else ""
        raise ConfigError(f"{error} --train-backend {name}{without} trains this model.") from error


def _megatron_vocab_size(checkpoint: str, flag: str) -> int:
    return read_architecture(checkpoint, flag=flag).vocab_size


def _fsdp_vocab_size(checkpoint: str, flag: str) -> int:
    # loads transformers, which the driver does not need otherwise
    from vime.backends.fsdp_utils.hf_config import read_config
    from vime.backends.fsdp_utils.probe import check_family

    settings = read_config(checkpoint, flag=flag)
    check_family(settings, flag=flag, checkpoint=checkpoint)
    return int(settings.get_text_config().vocab_size)


def _check_load(config: Config) -> None:
    """`--load X` without a checkpoint in X starts fresh only when X is where this run saves: one command line then
    starts and resumes. Anything else is probably a typing mistake, which would train from the beginning in silence."""
    load, save = config.model.load, config.model.save
    if load is None:
        return
    refuse_foreign(Path(load))
    checkpoint = find_latest(Path(load))
    if checkpoint is not None:
        refuse_damage(checkpoint)
        _check_mode_of(checkpoint, config)
        if not config.debug.debug_rollout_only:
            refuse_other_run(checkpoint, read_run_state(checkpoint).written_with, config)
        return
    if save is None and config.tracking.run_dir is not None:
        save = str(Path(config.tracking.run_dir) / "checkpoints")
    if save is not None and Path(load).resolve() == Path(save).resolve():
        return
    what = "has no checkpoint in it" if Path(load).exists() else "does not exist"
    raise ConfigError(
        f"--load {load}: {what}. Expected a directory of checkpoints or one of them; {_nearest_load(Path(load))}. To "
        "start fresh, remove the flag, or give the same directory to --save (it starts fresh once, then resumes)."
    )


def _check_ledger(config: Config) -> None:
    """Check that the ledger of mode streaming is there, and that it belongs to the checkpoint."""
    if not config.queue.has_ledger:
        return
    run_dir = Path(config.tracking.run_dir).expanduser().resolve() if config.tracking.run_dir else None
    checkpoint = find_latest(Path(config.model.load)) if config.model.load else None
    choice = choose_ledger(run_dir, checkpoint)
    if choice.note:
        sys.stderr.write(f"note: {choice.note}.\n")
    elif choice.origin is None and run_dir is not None and checkpoint is not None:
        check_spool(
            run_dir,
            lasting_file(run_dir / LEDGER_NAME, read_run_state(checkpoint).rollout_id),
            train=config.queue.transferqueue_partition,
            may_be_torn=config.queue.transferqueue_fsync == Fsync.NEVER,
        )


def _check_mode_of(checkpoint: Path, config: Config) -> None:
    """Refuse a checkpoint of the other kind: the next prompts are in the ledger in mode streaming, else in the data
    cursor."""
    has_ledger = LEDGER_RUN in read_run_state(checkpoint).data_source
    mode = config.queue.transferqueue_mode
    if has_ledger != config.queue.has_ledger:
        written = f"by a run of mode {STREAMING}" if has_ledger else "without a ledger (mode off or buffer)"
        raise ConfigError(
            f"--load {checkpoint}: written {written}, so in mode {mode} it is unknown which prompts it has trained. "
            f"Resume {'with' if has_ledger else 'without'} --transferqueue-mode {STREAMING}, or begin anew from an "
            "export (--save-hf) as --hf-checkpoint."
        )


def _nearest_load(load: Path) -> str:
    """Say what is there instead: checkpoints below, or the nearest name in the deepest directory that exists."""
    if find_latest(load / "checkpoints") is not None:
        return f"did you mean {load / 'checkpoints'}"
    missing = load
    while not missing.parent.exists():
        missing = missing.parent
    beside = missing.parent.iterdir() if missing.parent.is_dir() else ()
    names = sorted(path.name for path in beside if path.is_dir() and path != load)
    close = difflib.get_close_matches(missing.name, names, n=1)
    if close:
        return f"did you mean {missing.parent / close[0]}"
    return f"{missing.parent} holds {', '.join(names[:8]) or 'no directory'}"


def _check_prefetch(config: Config) -> None:
    """Check the staleness bound of train_async.py. Round r + 1 starts on what the engines serve before round r trains,
    so with an update every I rounds its tokens are up to I versions old when it trains: one more than under
    train.py."""
    if config.cluster.colocate:
        raise ConfigError(
            "--colocate under train_async.py: the next round is generated while this one trains, and both would need "
            "the same GPUs. Use train.py, or give engines GPUs of their own: --rollout-num-gpus N without --colocate."
        )
    if config.cluster.offload_train:
        raise ConfigError(
            "--offload-train under train_async.py has no effect: the next round is generated while this one trains. "
            "Use train.py, or remove the flag."
        )
    staleness, interval = config.queue.transferqueue_max_staleness, config.weights.update_weights_interval
    if staleness < interval:
        raise ConfigError(
            "train_async.py generates the next round while this one trains, so with --update-weights-interval "
            f"{interval} its tokens are up to {interval} version(s) old, but --transferqueue-max-staleness is "
            f"{staleness}. Set it to {interval}, or use train.py."
        )
    cuts = config.rollout.partial_rollout and not config.queue.has_ledger
    if cuts and staleness == interval and config.queue.mixed_version_policy == "correct":
        raise ConfigError(
            f"--partial-rollout under train_async.py with --transferqueue-max-staleness {staleness}: tokens of a cut "
            f"completion are up to {interval + 1} versions old when the next round trains, so it would begin anew. Set "
            f"it to {interval + 1}, or add --mask-offpolicy-in-partial-rollout."
        )
