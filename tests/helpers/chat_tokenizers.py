"""A small byte-level tokenizer with chat templates in the shapes of four model families."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

CHATML = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Reasoning is written for turns after the last user message only, and an empty block is written for the last turn.
THINKING = """{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}
{%- set content = m.content or '' %}{%- if m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ content.split('</think>')[-1].lstrip('\\n') }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Contents are trimmed; a call stands in place of the content, and results of tools must follow a call.
HEADERS = """{{ '<s>' }}{%- for m in messages %}{%- if m.tool_calls %}<|start|>assistant<|end|>

{{ m.tool_calls[0].function | tojson }}<|eot|>{%- elif m.role == 'tool' %}
{%- set before = messages[loop.index0 - 1] %}
{%- if not (before.tool_calls or before.role == 'tool') %}{{ raise_exception('no call') }}{%- endif %}
{{- '<|start|>ipython' }}<|end|>

{{ m.content | trim }}<|eot|>{%- else %}<|start|>{{ m.role }}<|end|>

{{ m.content | trim }}<|eot|>{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""

INST = """{{ '<s>' }}{%- for m in messages %}{%- if m.role == 'assistant' %} {{ m.content }}</s>{%- else %}
{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}{%- endfor %}"""

TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS, "inst": INST}
END = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "headers": "<|eot|>", "inst": "</s>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<s>", "</s>"]


def make_chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that a text has more than one tokenisation; eos ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("Ċ", "Ċ"), ("o", "n"), ("1", "2"), ("12", "3")]
    tokens = [*alphabet, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END[name], bos_token="<s>")
    made.chat_template = TEMPLATES[name]
    return made
