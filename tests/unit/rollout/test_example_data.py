"""The quick-start's task, tokenizer and data, and the few-shot data of the real-model example."""

import random

from tests.helpers.rollout_setup import example_module, write_model_directory

quickstart = example_module("quickstart/warm_start.py")
smollm2 = example_module("smollm2/prepare.py")


def test_a_problem_asks_for_the_kth_largest_letter():
    for seed in range(50):
        problem = quickstart.sample_problem(random.Random(seed))
        k, letters = int(problem.prompt[0]), problem.prompt[2:-1]
        assert problem.prompt == f"{k}:{letters}="
        assert 4 <= len(letters) <= 24
        assert problem.scratchpad == "".join(sorted(letters))
        assert problem.answer == sorted(letters, reverse=True)[k - 1]


def test_the_tokenizer_round_trips_and_puts_bos_in_front(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_model_directory(tmp_path))
    problem = quickstart.Problem("4:xlzw=", "l", "lwxz", 4)
    demonstration, prompt_length = quickstart.encode(problem, thinks=True)
    assert tokenizer(problem.prompt)["input_ids"] == demonstration[:prompt_length]
    answer = "<think>lwxz</think>l"
    assert tokenizer.encode(answer, add_special_tokens=False) == demonstration[prompt_length:-1]
    assert tokenizer.decode(demonstration[prompt_length:], skip_special_tokens=True) == answer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, demonstration[0], demonstration[-1]) == (1, 2, 1, 2)


def test_the_model_has_the_stated_size_and_a_seed_decides_its_weights():
    first, again, other = (quickstart.build_model(seed) for seed in (0, 0, 1))
    assert sum(parameter.numel() for parameter in first.parameters()) == 111_040
    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_few_shot_records_are_solved_examples_of_the_same_operator():
    for seed in range(50):
        record = smollm2.sample_record(random.Random(seed))
        *shots, asked = record["input"].split("\n")
        operator = record["metadata"]["operator"]
        assert len(shots) == 3
        for line in (*shots, asked + record["label"]):
            question, value = line.split("=")
            left, right = (int(part) for part in question.split(operator))
            assert {"+": left + right, "-": left - right, "*": left * right}[operator] == int(value)
