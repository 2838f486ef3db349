"""Launch scripts of slime with a tiny model: the run begins, on real vLLM, and trains its round."""

import json
from pathlib import Path

import pytest

from tests.helpers.slime_scripts import SCRIPTS, shrunk, without
from tests.helpers.tiny_models import make_qwen3
from tests.helpers.training import Training

TOOLS = Path(__file__).parents[2] / "helpers" / "slime_plugins"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    model = make_qwen3(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    records = [{"prompt": f"<{5 + number}> <9>", "label": {"target": "<7>"}} for number in range(4)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        (TOOLS / "tool_loop.py").read_text()
        + "\n\n"
        + (TOOLS / "rewards.py").read_text()
        + "\nreward_func = of_tool_use\n"
    )
    return {"model": model, "data": data, "eval": data, "out": tmp_path / "out", "plugin": plugin}


@pytest.mark.parametrize("name", [pytest.param("qwen3-4B", marks=pytest.mark.nightly), "retool-qwen3-4B"])
def test_a_script_of_slime_begins_with_a_tiny_model(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    script = SCRIPTS[name]
    words = shrunk(script.as_told(script.edited(paths)), paths["model"])
    words = without(words, "--use-wandb", "--wandb-project", "--wandb-group")
    words = [*words, "--device", "cpu", "--vllm-kv-cache-memory-bytes", str(32 << 20)]
    if name.startswith("retool"):
        words += ["--max-staleness", "1"]
    done = Training(script.program, words, tmp_path / "run").finish()
    assert done.code == 0, done.output[-3000:]
    assert "note: --vllm-mem-fraction-static 0.7: taken as --vllm-gpu-memory-utilization 0.7" in done.output
    (line,) = done.metrics().values()
    assert "train/kl_loss" in line  # --use-kl-loss --kl-loss-coef 0 measures it
    assert done.confirmed_hashes()
