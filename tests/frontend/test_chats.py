"""What becomes of messages: roles, parts, turns that are continued, templates and their variables."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.frontend.test_bad_requests import said
from tests.support.demo import demo_tokenizer
from tests.support.engine_peer import EnginePeer
from tests.support.frontend_process import FrontendProcess
from toka.messages import Submit, Work, decode

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
ASK = {"role": "user", "content": "Hello"}
ASKED = "<|im_start|>user\nHello<|im_end|>\n"
BEGUN = {"role": "assistant", "content": "Once upon "}


def prompt_sent(peer: EnginePeer) -> str:
    work = decode(peer.of(Submit)[-1].payload)
    assert isinstance(work, Work)
    return str(demo_tokenizer().decode(work.prompt.tolist(), skip_special_tokens=False))


def ask(sdk: openai.OpenAI, messages: list[Any], **more: Any) -> None:
    sdk.chat.completions.create(model="default", messages=messages, max_tokens=1, extra_body=more)


def test_roles_and_parts(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    ask(
        sdk,
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None},
            {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        ],
    )
    assert prompt_sent(peer) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "<|im_start|>assistant\nOnce upon "),
        ({"continue_final_message": True}, "<|im_start|>assistant\nOnce upon "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>assistant\nOnce upon "),
        ({"continue_final_message": False}, "<|im_start|>assistant\nOnce upon <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": True}, "<|im_start|>assistant\nOnce upon <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>assistant\nOnce upon <|im_end|>\n"),
    ],
)
def test_a_last_message_of_the_assistant(sdk: openai.OpenAI, peer: EnginePeer, more: Any, end: str) -> None:
    ask(sdk, [ASK, BEGUN], **more)
    assert prompt_sent(peer) == SYSTEM + ASKED + end


def test_what_excludes_each_other(http: httpx.Client) -> None:
    body = {"messages": [ASK, BEGUN], "continue_final_message": True, "add_generation_prompt": True}
    said(http.post("/v1/chat/completions", json=body), 400, "continue_final_message")


def test_a_refused_part_or_template_says_why(http: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [image]}]})
    assert "only text is supported, got 'image_url'" in said(answer, 400, "messages[0].content[0].type")["message"]
    answer = http.post("/v1/chat/completions", json={"messages": [ASK], "chat_template": "x"})
    assert "client_chat_template" in said(answer, 400, "chat_template")["message"]


def test_a_template_of_the_client(open_server: FrontendProcess, peer: EnginePeer) -> None:
    url = f"{open_server.url}/v1/chat/completions"
    body = {"messages": [ASK], "max_tokens": 1}
    mine = {"chat_template": "{{ greeting }} {{ messages[0].content }}", "chat_template_kwargs": {"greeting": "Hey"}}
    assert httpx.post(url, json=body | mine).status_code == 200
    assert prompt_sent(peer) == "Hey Hello"
    long = {"chat_template": "{% for i in range(1000) %}{{ 'word ' * 1000 }}{% endfor %}"}
    error = said(httpx.post(url, json=body | long), 400, "messages")
    assert error["code"] == "context_length_exceeded" and "at least" in error["message"], "before it is tokenized"
    for source in ("{% for %}", "{{ messages.__class__.__mro__ }}", "{{ 'x' * 10000000 }}", "{% if " + "(" * 10_000):
        said(httpx.post(url, content=json.dumps(body | {"chat_template": source})), 400, "chat_template")
