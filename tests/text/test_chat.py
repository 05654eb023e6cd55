"""Conversations become the text that the model was trained to read, or a sentence says why not."""

from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from cutaway.errors import CutawayError
from cutaway.text.gguf import tokenizer_from_gguf

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Is 1 < 2 & "true"? 🙂'},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}"""
LLAMA_LIKE = """{{- bos_token }}
{%- set ns = namespace(n=0) %}
{%- for m in messages if m.role != "system" %}
    {%- if loop.index0 > 9 %}{% break %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- if m.role == "assistant" %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}
    {%- else %}{{ "[INST] " ~ m.content ~ " [/INST]" }}{%- endif %}
{%- endfor %}
{{ m is defined }} {{ ns.n }} {{ messages[0] | tojson }} {{ tools is none }}
{{ {"b": [1], "a": "é<"} | tojson(indent=2) }}"""


@pytest.fixture
def speaking(byte_level_metadata):
    """A tokenizer with this chat template."""
    return lambda template: tokenizer_from_gguf(
        byte_level_metadata | {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": True}
    )


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE])
@pytest.mark.parametrize("talk", [TALK, TALK[1:2]])
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_the_one_that_transformers_makes(speaking, byte_level, template, talk, prompt):
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level, bos_token="<s>", eos_token="</s>")
    expected = reference.apply_chat_template(talk, chat_template=template, tokenize=False, add_generation_prompt=prompt)
    assert speaking(template).apply_chat_template(talk, add_generation_prompt=prompt) == expected


def test_a_bos_written_by_the_template_is_not_doubled(speaking):
    tokenizer = speaking(LLAMA_LIKE)
    ids = tokenizer.encode(tokenizer.apply_chat_template(TALK))
    assert ids[0] == 0 and ids.count(0) == 1


def test_templates_know_the_date(speaking):
    text = speaking("{{ strftime_now('%Y') }}").apply_chat_template(TALK)
    assert abs(int(text) - datetime.now().year) <= 1


def test_without_a_template_plain_text_is_proposed(byte_level_metadata):
    with pytest.raises(CutawayError, match=r"without a chat template.*as text"):
        tokenizer_from_gguf(byte_level_metadata).apply_chat_template(TALK)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "refuses these messages: Roles must alternate!"),
        ("one\n{% for %}", "broken in line 2"),
        ("{% nonsense %}", "broken in line 1"),
        ("{{ messages[0].nothing.more }}", "failed on these messages .UndefinedError"),
        ("{{ messages.append(1) }}", "failed on these messages .SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_refuses_or_fails_is_a_sentence(speaking, template, fault):
    with pytest.raises(CutawayError, match=fault):
        speaking(template).apply_chat_template(TALK)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "Message 0 is a str"),
        ([{"content": "hello"}], 'Message 0 has no "role"'),
        ([TALK[0], {"role": "user"}], 'Message 1, from user, has no "content"'),
        ([{"role": "user", "content": 7}], 'The "content" of message 0 is a int'),
    ],
)
def test_messages_of_a_wrong_form_are_named(speaking, messages, fault):
    with pytest.raises(CutawayError, match=fault):
        speaking(CHATML).apply_chat_template(messages)
