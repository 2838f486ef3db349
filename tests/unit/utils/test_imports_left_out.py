"""What is left out of an import is not loaded, and can be imported again afterwards."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vime.rollout.prompts import is_plain_tokenizer, load_tokenizer
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


def test_reading_a_model_s_shape_loads_no_model_class_and_does_not_keep_one_from_being_loaded(tmp_path: Path) -> None:
    settings = json.loads((ROOT / "examples/quickstart/model/config.json").read_text())
    del settings["transformers_version"]  # what it leaves out has to be asked for
    (tmp_path / "config.json").write_text(json.dumps(settings))
    code = (
        "import sys\n"
        "from vime.backends.megatron_utils.architecture import read_architecture\n"
        "assert read_architecture('examples/quickstart/model').num_layers == 2\n"
        "assert not {'transformers', 'torch'} & set(sys.modules)\n"
        f"assert read_architecture({str(tmp_path)!r}).num_layers == 2\n"
        f"assert {MODELS_OF_TRANSFORMERS!r} not in sys.modules\n"
        "from transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained('examples/quickstart/model')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)


@pytest.mark.parametrize(
    ("model_type", "is_plain"), [("llama", True), ("qwen3", True), ("qwen3_moe", True), ("qwen2", False)]
)
def test_a_plain_tokenizer_is_the_one_that_transformers_would_choose(
    model_type: str, is_plain: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    for path in (ROOT / "examples/quickstart/model").glob("*.json"):
        shutil.copy(path, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": model_type}))
    loaded, expected = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    assert is_plain_tokenizer(tmp_path) is is_plain
    assert type(loaded) is type(expected)
    assert loaded("1:ab=<eos>").input_ids == expected("1:ab=<eos>").input_ids
    assert loaded.special_tokens_map == expected.special_tokens_map
    assert loaded.init_kwargs == expected.init_kwargs


@pytest.mark.parametrize("settings", ['{"tokenizer_class": "Qwen2TokenizerFast"}', "{}", "[1]", "not JSON"])
def test_any_other_tokenizer_is_left_to_transformers(settings: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer_config.json").write_text(settings)
    assert not is_plain_tokenizer(tmp_path)


def test_a_plain_tokenizer_is_loaded_without_the_code_that_generates() -> None:
    code = (
        "import sys\n"
        "from vime.rollout.prompts import load_tokenizer\n"
        "assert load_tokenizer('examples/quickstart/model')('1').input_ids\n"
        "assert 'transformers.models.auto.auto_factory' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)


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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT, env=environment)


@pytest.mark.parametrize(
    "said",
    [
        {"TORCH_COMPILE_DISABLE": "1"},
        pytest.param({"TORCHDYNAMO_DISABLE": "1"}, marks=pytest.mark.nightly),
        pytest.param({}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_an_engine_s_imports_work_whatever_the_environment_says_of_the_compiler(said: dict[str, str]) -> None:
    """With TORCH_COMPILE_DISABLE alone, `torch.compile` still asks the compiler for its settings. The other two are
    what engines of a local run and of a joined cluster are told in tests/e2e."""
    code = "from vime.backends.vllm_utils import cpu_server\nprint(cpu_server.import_engine().__name__)\n"
    names = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    environment = {name: value for name, value in os.environ.items() if name not in names} | said
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert asked.stdout.split()[-1:] == ["vllm.v1.engine.utils"], asked.stderr[-2000:]
