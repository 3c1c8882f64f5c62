"""A model that thinks and knows tools, as far as a frontend sees it: a tokenizer with marks, and templates."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.walk import marked_tokenizer

QWEN = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for each in messages %}<|im_start|>{{ each.role }}
{{ each.content }}{% for call in each.tool_calls or [] %}
{{ "\\n<tool_call>\\n" }}
{%- set called = call.function %}{"name": "{{ called.name }}", "arguments": {{ called.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking is defined %}<think>
{% if not thinking %}
</think>

{% endif %}{% endif %}{% endif %}"""
"""Without `thinking` the model may think, or not."""
LLAMA = """
{%- if tools is not none %}Environment: ipython
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for each in messages %}
{%- if each.tool_calls is defined %}
{%- if each.tool_calls | length != 1 %}{{ raise_exception("one call a message") }}{% endif %}
{%- set call = each.tool_calls[0].function %}
assistant: {"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}
{{ each.role }}: {{ each.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
assistant: {% endif %}"""


def tool_model(folder: Path) -> Path:
    """Write the model, with the QWEN template, to `folder`, and return it."""
    folder.mkdir(exist_ok=True)
    marked_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": QWEN}))
    return folder


def marked_ids(text: str) -> list[int]:
    return list(marked_tokenizer().encode(text, add_special_tokens=False).ids)
