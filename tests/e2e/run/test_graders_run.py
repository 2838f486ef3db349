"""The graders that data sets of the field come with, each in one real run: in training by the record's own word, and in
evaluation sets with keys, grader and number of answers of their own. Tokens are a scripted engine's; what an answer
says is written by a generate function, because no such engine solves anything."""

import json
from pathlib import Path

from tests.helpers.training import TinyTask, train

SCRIPTED = ("--debug-engine-module", "vime.backends.vllm_utils.scripted_server")
PLUGIN = '''"""Every second answer is right, in the words that its grader looks for."""

from vime.rollout.generation import generate

RIGHT = {
    "deepscaler": "so it is</think> \\\\boxed{\\\\frac{1}{2}}",
    "f1": "The cat sat.",
    "gpqa": "Not (A). The answer is (B).",
    "boxed_math": "1/3? \\\\boxed{0.5}",
}


async def answer(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.response = RIGHT[sample.metadata["rm_type"]] if sample.index % 2 == 0 else "nothing"
    return sample
'''
LABELS = {"deepscaler": "0.5", "f1": "a cat sat down", "gpqa": "B", "boxed_math": "1/2"}
# of a right answer; f1: "cat sat" of "cat sat down" is precision 1, recall 2/3: 0.8
REWARDS = {"deepscaler": 1.0, "f1": 0.8, "gpqa": 1.0, "boxed_math": 1.0}


def test_each_grader_scores_a_round_and_an_evaluation_set_of_its_own(tiny_task: TinyTask, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    prompts = tmp_path / "train.jsonl"
    records = [{"input": f"{name[0]}=", "label": LABELS[name], "metadata": {"rm_type": name}} for name in LABELS]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    sets = ['[defaults]\ninput_key = "question"\nlabel_key = "answer"\nmetadata_key = "extra"\ntemperature = 0.5\n']
    for number, name in enumerate(LABELS, start=1):
        record = {"question": "ab=", "answer": LABELS[name], "extra": {"rm_type": "exact_match"}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
        sets.append(
            f'[[datasets]]\nname = "{name}"\npath = "{name}.jsonl"\nrm_type = "{name}"\n'
            f"n_samples_per_eval_prompt = {2 * number}\nmax_response_len = {4 * number}\n"
        )
    (tmp_path / "sets.toml").write_text("".join(sets))
    given = dict(zip(tiny_task.flags()[::2], tiny_task.flags()[1::2], strict=True))
    del given["--custom-rm-path"]  # each record says who scores it
    given |= {"--prompt-data": str(prompts), "--num-rollout": "1", "--rollout-batch-size": "4"}
    given |= {"--custom-generate-function-path": f"{tmp_path}/plugin.py:answer"}
    given |= {"--eval-config": str(tmp_path / "sets.toml"), "--eval-interval": "1"}
    done = train([word for pair in given.items() for word in pair] + list(SCRIPTED), tmp_path / "run")
    assert done.code == 0, done.output
    line = {name: value for step in done.metrics().values() for name, value in step.items()}
    # two of the four answers to each prompt are right: a half of 1, 0.8, 1 and 1
    assert abs(line["rollout/reward_mean"] - 0.475) < 1e-6
    assert line["train/grad_norm"] > 0
    for number, (name, reward) in enumerate(REWARDS.items(), start=1):
        assert abs(line[f"eval/{name}/reward_mean"] - reward / 2) < 1e-6, name
        assert line[f"eval/{name}/num_samples"] == 2 * number
        assert line[f"eval/{name}/response_len_max"] <= 4 * number
