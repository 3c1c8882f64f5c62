from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import tiny_config
from toka.model import open_model
from toka.text.chat import ChatTemplate, Rendering

QWEN = """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- if message.tool_calls %}{{- message.tool_calls|tojson }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- {"output": message.content} | tojson }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
ODD = """
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% generation %}
  {{ message.role|upper }}: {{ message|tojson(indent=2) }}
    {% endgeneration %}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
{% endfor %}
{{ {'a': "<b>&'é"}|tojson }} {{ eos_token }} {{ pad_token is defined }} {{ documents is none }}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be <b>brief</b>. \n"}, {"role": "user", "content": "  Wie geht's, 世界? 🦜 \n"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "tool", "content": '{"x": "<1>"}', "tool_call_id": "call_1"},
        {"role": "user", "content": "and 2 + 2?", "name": "ann"},
        {"role": "assistant", "content": "4"},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_config(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [QWEN, LLAMA, ODD, "demo"])
def test_the_text_is_the_one_transformers_renders(
    template: str, prompt: bool, chat: list[dict[str, Any]], folder: Path
) -> None:
    from transformers import AutoTokenizer

    source = open_model("").chat_template() if template == "demo" else template
    assert source is not None
    theirs = AutoTokenizer.from_pretrained(folder)
    special = open_model(str(folder)).special_tokens()
    ours = ChatTemplate(source, special).render(chat, Rendering(add_generation_prompt=prompt))
    assert ours == theirs.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=prompt)


def test_what_a_template_refuses_is_said() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ValueError, match="roles must alternate"):
        template.render(CHATS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[99].role.upper() }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
        "{% set text = 'x' * 100000 %}{% for i in range(100000) %}{{ text }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [messages] }}",
        "{{ 10 ** 10 ** 10 }}",
    ],
)
def test_a_template_reaches_nothing_and_fails_in_one_sentence(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template"):
        ChatTemplate(source, {}).render(CHATS[0])


def test_a_template_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="the chat template is wrong"):
        ChatTemplate("{% for %}", {})


CONTINUED = [*CHATS[2], {"role": "user", "content": "Tell me"}, {"role": "assistant", "content": "Once upon "}]


@pytest.mark.parametrize("content", ["Once upon ", "Once\n\n", "<think>\nhm"])
@pytest.mark.parametrize("template", [QWEN, LLAMA, "demo"])
def test_a_last_message_is_continued_as_transformers_does(template: str, content: str, folder: Path) -> None:
    from transformers import AutoTokenizer

    source = open_model("").chat_template() if template == "demo" else template
    assert source is not None
    chat: list[dict[str, Any]] = [*CONTINUED[:-1], {"role": "assistant", "content": content}]
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate(source, open_model(str(folder)).special_tokens())
    text = ours.render(chat, Rendering(add_generation_prompt=False, continue_final_message=True))
    expected = theirs.apply_chat_template(
        chat, chat_template=source, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )
    assert text == expected


@pytest.mark.parametrize("content", [" ", ""])
def test_nothing_is_continued_behind_the_whole_header(content: str) -> None:
    rendering = Rendering(add_generation_prompt=False, continue_final_message=True)
    text = ChatTemplate(LLAMA, {}).render([*CONTINUED[:-1], {"role": "assistant", "content": content}], rendering)
    assert text == ChatTemplate(LLAMA, {}).render(CONTINUED[:-1])


def test_the_developer_is_the_system_where_the_template_knows_none() -> None:
    template, said = "{% for each in messages %}{{ each.role }}{% endfor %}", [{"role": "developer", "content": "x"}]
    assert ChatTemplate(template, {}).render(said) == "system"
    assert ChatTemplate(template + "{# developer #}", {}).render(said) == "developer"


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it() -> None:
    with pytest.raises(ValueError, match="leaves out the message"):
        ChatTemplate("x", {}).render(CONTINUED, Rendering(continue_final_message=True))


def test_variables_reach_the_template() -> None:
    template = ChatTemplate(QWEN, {})
    text = template.render(CHATS[0], Rendering(variables={"enable_thinking": False}))
    assert text == template.render(CHATS[0]) + "<think>\n\n</think>\n\n"
