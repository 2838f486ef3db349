"""vLLM finds our weight-transfer engine by the installed entry point, and the package imports without vLLM."""

import importlib.metadata
import subprocess
import sys

import pytest

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


STARTED = """
import multiprocessing, os
from vime.backends.vllm_utils.plugin import _parent
def check():
    print(_parent() == os.getppid(), flush=True)
if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    child = multiprocessing.Process(target=check)
    child.start()
    child.join(60)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_of_vllm_finds_the_parent_that_it_is_to_end_with(tmp_path, method):
    """It ends where its parent is another process than it believes."""
    script = tmp_path / "started.py"
    script.write_text(STARTED.format(method=method))
    assert subprocess.check_output([sys.executable, str(script)], text=True, timeout=120).strip() == "True"
