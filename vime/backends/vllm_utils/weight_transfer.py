"""The engine's side of a weight update. Runs inside vLLM's workers; found through plugin.py.

Our route in vLLM's server (routes.py) asks `UpdateWorker`, which drives vLLM's `start_weight_update` ->
`update_weights` (one bucket each) -> `finish_weight_update` and says what each worker received. What travels and how is
`vime.weights`' matter; here the tensors enter the model, and two copies that vLLM's CPU build keeps beside the
parameters are rebuilt.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vime.backends.vllm_utils.routes import WorkerWeights, adapter_id
from vime.config.lora import AdapterInfo
from vime.config.model_files import read_headers
from vime.types import PublishError
from vime.utils.heap import FreedMemory
from vime.weights.adapter_files import write_adapter
from vime.weights.transports import make_receiver
from vime.weights.update_info import UpdateInfo, is_last
from vime.weights.wire import BucketReceiver

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

SINKS = ".self_attn.sinks"
STACKED = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
STACKED |= {f"{name}_bias": own.replace("weight", "bias") for name, own in STACKED.items()}
"""GPT-OSS's tensors of all experts of a layer, and what vLLM calls the part of one expert."""
BUFFER_SUFFIXES = (".inv_freq", ".masked_bias", ".attn.bias")  # in some checkpoints, but not parameters


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """What the trainer says when it connects: the transport's name, and what that transport's receiver reads."""

    told: dict[str, object]


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """An `UpdateInfo` as it arrived; the receiver checks it."""

    told: dict[str, object]


class VimeEngine(WeightTransferEngine[ConnectInfo, BucketInfo]):
    """Loads Hugging Face tensors bucket by bucket, over the transport that the trainer names when it connects."""

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.receiver: BucketReceiver | None = None
        self._received: set[str] = set()
        self._sinks: dict[str, torch.Tensor] = {}  # of the update under way
        self._has_model = False  # a trainer has brought it; until then it is whatever the engine began with
        self._adapter: dict[str, torch.Tensor] = {}  # of the update under way
        self._required: frozenset[str] | None = None
        self._freed_by_generation, self._freed_by_update = FreedMemory(), FreedMemory()

    def parse_init_info(self, init_dict: dict[str, object]) -> ConnectInfo:
        return ConnectInfo(init_dict)

    def parse_update_info(self, update_dict: dict[str, object]) -> BucketInfo:
        return BucketInfo(update_dict)

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """The former receiver stays until the new one is connected: a call that comes late is refused there."""
        parallel = self.parallel_config
        receiver = make_receiver(str(init_info.told["transport"]), self.device)
        receiver.connect(init_info.told, parallel.data_parallel_index * parallel.world_size + parallel.rank)
        self.shutdown()
        self.receiver = receiver
        self._required = required_names(self.model_config)

    def start_weight_update(self) -> None:
        self._freed_by_generation.give_back()  # the update needs its largest tensors three times
        self._connected.start()
        self._received, self._has_model, self._sinks = set(), False, {}
        forget_half_loaded(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As in the base class, without its device synchronisation on a build that has no device to synchronise."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        for pairs in self._connected.receive(update_info.told):
            self._received.update(name for name, _ in pairs)
            self._sinks |= {name: tensor.clone() for name, tensor in pairs if name.endswith(SINKS)}
            pairs = [pair for name, tensor in pairs if not name.endswith(SINKS) for pair in by_expert(name, tensor)]
            with disable_mtp_completeness_check():  # it would miss the tensors of the other buckets
                self.model.load_weights(pairs)  # type: ignore[operator]  # vLLM's models have it

    def finish_weight_update(self) -> None:
        self._connected.finish()
        missing = sorted((self._required or frozenset()) - self._received)
        if missing:
            raise PublishError(
                f"weight update lacks {len(missing)} tensors of the model's checkpoint, first {missing[:3]}. vLLM "
                "would keep their old values in silence: export every tensor."
            )
        finalize_layerwise_reload(self.model, self.model_config)
        load_sinks(self.model, self._sinks)
        self._has_model = True
        if self.device.type == "cpu":
            refresh_packed_copies(self.model)
            self._freed_by_update.give_back()

    def check_call(self, update_info: UpdateInfo) -> None:
        self._connected.check_call(update_info)

    def receive_adapter(self, update_info: UpdateInfo) -> None:
        """Keep one bucket of an adapter; the model is not touched."""
        if update_info["index"] == 0:
            self._connected.start()
            self._adapter = {}
        for pairs in self._connected.receive(dict(update_info)):
            self._adapter.update((name, tensor.to("cpu", copy=True)) for name, tensor in pairs)

    def take_adapter(self, adapter: AdapterInfo) -> dict[str, torch.Tensor]:
        """Return the tensors of an adapter whose last bucket has arrived. PublishError when one is missing: vLLM would
        take it for zero in silence. Also when no model was brought before it, as to an engine that was started
        again."""
        self._connected.finish()
        taken, self._adapter = self._adapter, {}
        if not self._has_model:
            raise PublishError("an adapter came before the model that it belongs to. Publish the base first.")
        wanted = adapter_names(self._required or frozenset(), adapter)
        missing = sorted(wanted - set(taken))
        if missing:
            raise PublishError(f"adapter lacks {len(missing)} of {len(wanted)} tensors, first {missing[:3]}.")
        return taken

    def shutdown(self) -> None:
        if self.receiver is not None:
            self.receiver.close()

    @property
    def _connected(self) -> BucketReceiver:
        if self.receiver is None:
            raise PublishError("weight update before init_weight_transfer_engine: the trainer has not connected.")
        return self.receiver


class UpdateWorker:
    """Mixed into vLLM's worker by --worker-extension-cls; every method can be called by `collective_rpc`."""

    # of the worker class, which knows whether an update is open
    weight_transfer_engine: VimeEngine
    start_weight_update: Callable[[], None]
    update_weights: Callable[[UpdateInfo], None]
    finish_weight_update: Callable[[], None]
    _weight_update_active: bool
    # of its model runner, with --enable-lora
    add_lora: Callable[[LoRARequest], bool]
    list_loras: Callable[[], set[int]]

    def vime_update_weights(self, update_info: UpdateInfo) -> WorkerWeights:
        """Load a bucket; an update begins with its first and ends with its last. Returns `vime_weight_report`.

        One whose sender went between two buckets is given up when the next one begins."""
        self.weight_transfer_engine.check_call(update_info)
        if update_info["index"] == 0:
            self._weight_update_active = False  # vLLM has no call for it; `VimeEngine` clears what was half loaded
            self.start_weight_update()
        self.update_weights(update_info)
        if is_last(update_info):
            self.finish_weight_update()
        return self.vime_weight_report()

    def vime_update_adapter(self, update_info: UpdateInfo, adapter: AdapterInfo, version: int) -> WorkerWeights:
        """Take a bucket of an adapter; with the last, the adapter of this version is there under an id of its own.

        Never in the place of another: vLLM would compute with what its prefix cache holds of that one.
        """
        engine = self.weight_transfer_engine
        engine.receive_adapter(update_info)
        if is_last(update_info):
            if adapter_id(version) in self.list_loras():
                raise PublishError(f"the adapter of version {version} is there already. Publish another version.")
            tensors = engine.take_adapter(adapter)
            with tempfile.TemporaryDirectory(prefix="vime-adapter-") as directory:  # vLLM loads adapters from files
                write_adapter(Path(directory), tensors, adapter)
                self.add_lora(LoRARequest(str(version), adapter_id(version), directory))
        return self.vime_weight_report()

    def vime_weight_report(self) -> WorkerWeights:
        """Return content hash and number of tensors of the newest update, as this worker received it."""
        receiver = self.weight_transfer_engine.receiver
        if receiver is None:
            return {"content_hash": "", "num_tensors": 0}
        return {"content_hash": receiver.content_hash, "num_tensors": receiver.num_tensors}

    def vime_process_report(self) -> dict[str, str | bool]:
        """Whether anything of the trainer, which redirects torch.cuda on a machine without one, is in this process."""
        return {
            "current_device_module": torch.cuda.current_device.__module__,
            "trainer_imported": any(name.startswith("vime.backends.megatron_utils") for name in sys.modules),
            "megatron_imported": "megatron.core" in sys.modules,
        }


def by_expert(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """GPT-OSS's stacked experts one by one, any other tensor as it is. vLLM 0.32 copies a stack into its parameter
    without the parameter's loader, which the layerwise reload waits for: the old experts would stay, packed twice."""
    prefix, _, part = name.rpartition(".mlp.experts.")
    if not prefix or part not in STACKED:
        return [(name, tensor)]
    return [(f"{prefix}.mlp.experts.{number}.{STACKED[part]}", expert) for number, expert in enumerate(tensor)]


def forget_half_loaded(model: torch.nn.Module) -> None:
    """Drop what an update that was cut short has left in layers that wait for the rest of their tensors. vLLM would
    count them twice, and take a layer for whole that lacks some."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel, info.loaded_weights = 0, []


def load_sinks(model: torch.nn.Module, sinks: dict[str, torch.Tensor]) -> None:
    """Copy this rank's heads of GPT-OSS's attention sinks, behind the layerwise reload, which misses them likewise."""
    parameters = dict(model.named_parameters())
    for name, sinks_H in sinks.items():
        mine = parameters[name.replace(SINKS, ".attn.sinks")]
        mine.data.copy_(sinks_H.chunk(sinks_H.numel() // mine.numel())[get_tensor_model_parallel_rank()])


def refresh_packed_copies(model: torch.nn.Module) -> None:
    """Rebuild what vLLM 0.32's CPU build derives from weights on the first load only.

    * A language-model head tied by `tie_weights` (Llama) keeps a packed oneDNN copy. No tensor is loaded into that
      module, so the layerwise reload leaves the copy at the old weights: log-probabilities were off by up to 2.4.
    * MoE experts are packed for the grouped product inside `_setup_kernel`, which runs once: off by 0.17.
    Neither raises an error, and a checksum of the parameters cannot see it.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and method is not None:
            method.process_weights_after_loading(module)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None and hasattr(module, "w13_weight"):
            experts.process_weights_after_loading(module)


def adapter_names(model_names: frozenset[str], adapter: AdapterInfo) -> frozenset[str]:
    """Names of the tensors that an adapter of this model holds, of the names in the model's files."""
    modules = [name.removesuffix(".weight") for name in model_names if name.endswith(".weight")]
    targets = set(adapter["target_modules"])
    return frozenset(
        f"base_model.model.{module}.lora_{half}.weight"
        for module in modules
        if module.rpartition(".")[2] in targets
        for half in "AB"
    )


def required_names(model_config: ModelConfig) -> frozenset[str] | None:
    """Names that an update must hold: those of the checkpoint the engine started from. None when it is not local."""
    found = read_headers(model_config.model, flag="--model")
    if not found:
        return None
    names = {name for name in found if not name.endswith(BUFFER_SUFFIXES)}
    if model_config.hf_config.to_dict().get("tie_word_embeddings"):
        names.discard("lm_head.weight")
    return frozenset(names)
