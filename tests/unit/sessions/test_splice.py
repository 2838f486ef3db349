"""The next prompt keeps the recorded tokens and adds what the template writes after them."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.chat_tokenizers import END, TEMPLATES, make_chat_tokenizer
from vime.sessions.splice import Message, continuation
from vime.sessions.tokenizer import HfChatTokenizer

TOKENIZERS = {name: HfChatTokenizer(make_chat_tokenizer(name)) for name in TEMPLATES}
TEXT = st.text("thean on123\n.é ", min_size=1, max_size=12).map(lambda text: f"a{text}b")  # templates trim
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def spelled(tokenizer: HfChatTokenizer, text: str) -> list[int]:
    """Another tokenisation of the text than the tokenizer's own: character by character."""
    return [number for character in text for number in tokenizer.encode(character)]


@pytest.mark.parametrize("name", ["chatml", "headers", "inst"])
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), question=TEXT)
def test_the_spliced_text_is_the_rendered_conversation_where_the_template_rewrites_nothing(
    name: str, turns: list[tuple[str, str]], question: str
) -> None:
    tokenizer = TOKENIZERS[name]
    messages: list[Message] = []
    ids: list[int] = []
    for asked, answered in turns:
        new: list[Message] = [{"role": "user", "content": asked}]
        if ids:
            following = continuation(tokenizer, messages[:-1], messages[-1], new, None, ids[-1])
            assert following is not None
            ids += following
        else:
            ids = tokenizer.encode(tokenizer.render(new, None, asks=True))
        lead = " " if name == "inst" else ""  # this family writes a space before a completion
        ids += [*spelled(tokenizer, lead + answered), *tokenizer.encode(END[name])]
        messages += [*new, {"role": "assistant", "content": answered}]
    last: list[Message] = [{"role": "user", "content": question}]
    following = continuation(tokenizer, messages[:-1], messages[-1], last, None, ids[-1])
    assert following is not None
    assert tokenizer.decode([*ids, *following]) == tokenizer.render([*messages, *last], None, asks=True)


@pytest.mark.parametrize("name", ["template_chatml", "template_deepseek_vl2"])
@given(answered=TEXT, question=TEXT)
def test_templates_that_vllm_brings_are_spliced_as_they_render(name: str, answered: str, question: str) -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations
    made = make_chat_tokenizer("chatml")
    templates = Path(found.submodule_search_locations[0]) / "transformers_utils/chat_templates"
    made.chat_template = (templates / f"{name}.jinja").read_text()
    tokenizer = HfChatTokenizer(made)
    asked: list[Message] = [{"role": "user", "content": "q"}]
    said: Message = {"role": "assistant", "content": answered}
    new: list[Message] = [{"role": "user", "content": question}]
    ids = tokenizer.encode(tokenizer.render(asked, None, asks=True))
    ids += [*spelled(tokenizer, answered), *tokenizer.encode("<|im_end|>")]
    following = continuation(tokenizer, asked, said, new, None, ids[-1])
    assert following is not None
    assert tokenizer.decode([*ids, *following]) == tokenizer.render([*asked, said, *new], None, asks=True)


@given(thought=TEXT, answered=TEXT, question=TEXT)
def test_a_template_that_drops_reasoning_changes_no_recorded_token(thought: str, answered: str, question: str) -> None:
    tokenizer = TOKENIZERS["thinking"]
    asked: list[Message] = [{"role": "user", "content": "q"}]
    prompt = tokenizer.encode(tokenizer.render(asked, None, asks=True))
    said = tokenizer.encode(f"<think>\n{thought}\n</think>\n\n{answered}<|im_end|>")
    new: list[Message] = [{"role": "user", "content": question}]
    message: Message = {"role": "assistant", "content": answered, "reasoning_content": thought}
    following = continuation(tokenizer, asked, message, new, None, said[-1])
    assert following is not None
    assert tokenizer.decode(following) == f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    rendered = tokenizer.render([*asked, message, *new], None, asks=True)
    assert tokenizer.decode([*prompt, *said, *following]) != rendered  # which has lost the reasoning


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("chatml", "\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"),
        ("thinking", "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"),
        ("headers", "<|start|>ipython<|end|>\n\n3<|eot|><|start|>assistant<|end|>\n\n"),
    ],
)
def test_the_result_of_a_tool_follows_the_sampled_call(name: str, after: str) -> None:
    tokenizer = TOKENIZERS[name]
    said: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result: Message = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    end = tokenizer.encode(END[name])[0]
    following = continuation(tokenizer, [{"role": "user", "content": "q"}], said, [result], None, end)
    assert following is not None
    assert tokenizer.decode(following) == after


def test_a_cut_completion_is_closed_by_the_template() -> None:
    tokenizer = TOKENIZERS["chatml"]
    last = tokenizer.encode("b")[0]
    said: Message = {"role": "assistant", "content": "ab"}
    new: list[Message] = [{"role": "user", "content": "go on"}]
    following = continuation(tokenizer, [{"role": "user", "content": "q"}], said, new, None, last)
    assert following is not None
    assert tokenizer.decode(following).startswith("<|im_end|>\n<|im_start|>user\ngo on")


def test_a_template_that_refuses_to_continue_gives_a_branch() -> None:
    made = make_chat_tokenizer("chatml")
    made.chat_template = "{{ raise_exception('one turn only') if messages | length > 2 else messages[0].content }}"
    said: Message = {"role": "assistant", "content": "a"}
    asked: Message = {"role": "user", "content": "q"}
    assert continuation(HfChatTokenizer(made), [asked], said, [asked], None, 1) is None
