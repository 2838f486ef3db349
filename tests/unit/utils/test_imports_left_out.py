"""What is left out of an import is not loaded, and can be imported again afterwards."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vime.utils.imports import MODELS_OF_TRANSFORMERS, without, without_collector

ROOT = Path(__file__).resolve().parents[3]


def test_a_module_is_not_found_inside_and_is_there_again_outside() -> None:
    sys.modules.pop("colorsys", None)
    with without("colorsys"), pytest.raises(ImportError):
        import colorsys
    import colorsys

    assert colorsys.rgb_to_hls


def test_a_module_that_is_loaded_already_stays() -> None:
    with without("json"):
        import json
    assert json.loads("1") == 1


def test_reading_a_model_s_shape_loads_no_model_class_and_does_not_keep_one_from_being_loaded() -> None:
    code = (
        "import sys\n"
        "from vime.backends.megatron_utils.architecture import read_architecture\n"
        "assert read_architecture('examples/quickstart/model').num_layers == 2\n"
        f"assert {MODELS_OF_TRANSFORMERS!r} not in sys.modules\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained('examples/quickstart/model')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=ROOT)


def test_the_collector_works_again_afterwards_and_leaves_alone_what_was_imported() -> None:
    before = gc.get_freeze_count()
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            pass
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


@pytest.mark.parametrize(("off", "is_loaded"), [("1", False), ("0", True)])
def test_the_queue_loads_torch_s_compiler_only_where_something_may_be_compiled(off: str, is_loaded: bool) -> None:
    code = (
        "import sys, torch\n"
        "from vime.handoff.queue_keys import QueueKeys, secure_sockets\n"
        "mark = torch.compiler.allow_in_graph\n"
        "secure_sockets(QueueKeys.make())\n"
        "assert 'tensordict' in sys.modules\n"
        f"assert ('torch._dynamo' in sys.modules) is {is_loaded}\n"
        "assert torch.compiler.allow_in_graph is mark\n"
    )
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": off}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=ROOT, env=environment)
