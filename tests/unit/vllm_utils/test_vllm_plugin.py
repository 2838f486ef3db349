"""vLLM finds our weight-transfer engine by the installed entry point, and the package imports without vLLM."""

import importlib.metadata
import subprocess
import sys

from vime.backends.vllm_utils.launch import PLUGIN


def test_the_entry_point_is_installed_under_the_name_that_the_launcher_admits():
    [entry] = [found for found in importlib.metadata.entry_points(group="vllm.general_plugins") if found.name == PLUGIN]
    assert entry.value == "vime.backends.vllm_utils.plugin:register"


def test_the_owner_side_imports_neither_vllm_nor_the_trainer():
    code = (
        "import sys, vime.backends.vllm_utils.engine, vime.backends.vllm_utils.router,"
        " vime.backends.vllm_utils.control, vime.backends.vllm_utils.plugin\n"
        "print(sorted({'vllm', 'torch', 'megatron', 'transformers', 'ray'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "[]"
