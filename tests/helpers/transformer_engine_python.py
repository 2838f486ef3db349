"""The Python half of Transformer Engine without its compiled half, which needs CUDA to be built.

    python -m tests.helpers.transformer_engine_python MODELS.json ANSWERS.json

reads {name: [model directory, whether experts are grouped]}; builds each model and its optimizer on one rank with
`--transformer-impl transformer_engine` and writes {name: {"parameters": {name: shape}, "classes": [...], "sums": [names
of modules that add gradients of weights in place], "rotates": whether positions are rotated in one kernel}}. Nothing is
computed: the compiled functions are made up. The package is not installed beside the others, because megatron takes a
Transformer Engine that it finds for a whole one (scripts/install.sh puts it into a directory of its own).
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from unittest import mock

PLACE = Path(sys.prefix) / "transformer-engine" / "transformer_engine"
ABSENT = ("onnx", "onnxscript", "transformer_engine.common.triton", "transformer_engine.pytorch.triton")
"""Packages that it imports and that a model is built without."""


class MadeUp(types.ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.util.spec_from_loader(name, None)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, found := mock.MagicMock(name=name))
        return found


def install() -> None:
    """Make `import transformer_engine` work in this process."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # so that it loads no compiled library
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(PLACE)]
    [about] = PLACE.parent.glob("transformer_engine-*.dist-info")
    vars(package)["__version__"] = about.name.removeprefix("transformer_engine-").removesuffix(".dist-info")
    package.__spec__ = importlib.util.spec_from_file_location(
        "transformer_engine", PLACE / "__init__.py", submodule_search_locations=[str(PLACE)]
    )
    sys.modules["transformer_engine"] = package
    kernels = [path for name in ABSENT[2:] for path in (PLACE.parent / name.replace(".", "/")).glob("[!_]*.py")]
    inner = [".".join(path.relative_to(PLACE.parent).with_suffix("").parts) for path in kernels]
    for name in ("transformer_engine_torch", *ABSENT, *inner):
        sys.modules[name] = MadeUp(name)
    compiled = vars(sys.modules["transformer_engine_torch"])
    compiled["DType"] = _members("pytorch/constants.py", "DType")
    compiled["NVTE_Fused_Attn_Backend"] = _members("pytorch/cpp_extensions/fused_attn.py", "FusedAttnBackend", "NVTE_")
    common = importlib.import_module("transformer_engine.common")
    vars(common)["load_framework_extension"] = lambda _framework: None
    importlib.import_module("transformer_engine.pytorch")


def _members(file: str, name: str, prefix: str = "") -> type[enum.IntEnum]:
    """Return the compiled half's copy of an enumeration; the two are compared at import."""
    classes = [node for node in ast.parse((PLACE / file).read_text()).body if isinstance(node, ast.ClassDef)]
    [found] = [node for node in classes if node.name == name]
    targets = [target for node in found.body if isinstance(node, ast.Assign) for target in node.targets]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return enum.IntEnum(name, {prefix + each: number for number, each in enumerate(names)})


def main(models: Path, answers: Path) -> None:
    install()
    from vime.backends.megatron_utils.architecture import read_architecture
    from vime.backends.megatron_utils.dry_run import fake_rank
    from vime.backends.megatron_utils.initialize import prepare_process
    from vime.backends.megatron_utils.model import build_chunks, transformer_config, with_precision
    from vime.backends.megatron_utils.optimizer import PolicyOptimizer
    from vime.config.cluster import OptimizerConfig, ParallelConfig

    prepare_process("cpu")
    found = {}
    for name, (directory, is_grouped) in json.loads(models.read_text()).items():
        parallel = ParallelConfig(transformer_impl="transformer_engine", moe_grouped_gemm=is_grouped)
        with fake_rank(parallel, rank=0, world_size=1):
            architecture = read_architecture(directory)
            config = transformer_config(architecture, parallel)
            with (
                mock.patch("torch.cuda.is_available", return_value=True),  # else its layers refuse to be made
                mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
                mock.patch("torch.cuda.get_device_properties", mock.MagicMock()),
            ):
                [chunk] = build_chunks(architecture, config, parallel)
            with mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", True):  # its Adam asks for a GPU
                chunks = with_precision([chunk], config)
                PolicyOptimizer(chunks, config, optimizer=OptimizerConfig(), parallel=parallel, total_steps=1)
            found[name] = {
                "parameters": {key: list(parameter.shape) for key, parameter in chunk.named_parameters()},
                "classes": sorted({type(module).__name__ for module in chunk.modules()}),
                "sums": [key for key, module in chunk.named_modules() if getattr(module, "fuse_wgrad_accumulation", 0)],
                "rotates": config.apply_rope_fusion,
            }
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
