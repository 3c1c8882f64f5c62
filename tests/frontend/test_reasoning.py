"""`reasoning_content`, whole and streamed, of a model whose template has think blocks."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.frontend.test_chats import prompt_sent
from tests.support.demo import ids_of
from tests.support.engine_peer import EnginePeer, script
from tests.support.frontend_process import FrontendProcess

TEMPLATE = (
    "{% for each in messages %}{{ each.role }}: "
    "{% if each.reasoning_content %}<think>\n{{ each.reasoning_content }}\n</think>\n\n{% endif %}{{ each.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% if opens %}<think>\n{% endif %}{% endif %}"
)
CHAT: list[Any] = [{"role": "user", "content": "What is <think>"}]


def ask(url: str, stream: bool, messages: list[Any] = CHAT, **more: Any) -> tuple[str | None, str, Any]:
    """The reasoning, the content and the reason of the end."""
    extra = {"chat_template": TEMPLATE, **more}
    args: dict[str, Any] = {"model": "default", "messages": messages, "max_tokens": 40, "extra_body": extra}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, _strict_response_validation=True) as sdk:
        if not stream:
            choice = sdk.chat.completions.create(**args).choices[0]
            message = choice.message.model_dump()
            return message["reasoning_content"], message["content"], choice.finish_reason
        choices = [chunk.choices[0] for chunk in sdk.chat.completions.create(**args, stream=True)]
        deltas = [choice.delta.model_dump() for choice in choices]
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        return reasoning or None, "".join(delta["content"] or "" for delta in deltas), choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_thought_and_what_is_answered(open_server: FrontendProcess, peer: EnginePeer, stream: bool) -> None:
    url = open_server.url
    peer.token_of = script(ids_of("<think>\nIs it 🦜 or two?\n</think>\n\nTwo.\n"))
    assert ask(url, stream) == ("Is it 🦜 or two?", "Two.\n", "stop")
    assert ask(url, stream, stop="Two") == ("Is it 🦜 or two?", "", "stop")
    assert ask(url, stream, stop=" or")[:2] == ("Is it 🦜", "")
    peer.token_of = script(ids_of("hm\n</think>\n\nTwo <think>"))
    assert ask(url, stream, chat_template_kwargs={"opens": True}) == ("hm", "Two <think>", "stop")
    assert ask(url, stream, [*CHAT, {"role": "assistant", "content": "<think>So"}])[:2] == ("hm", "Two <think>")
    assert ask(url, stream)[:2] == (None, "hm\n</think>\n\nTwo <think>"), "no block, nothing thought"


@pytest.mark.parametrize("stream", [False, True])
def test_a_block_that_does_not_end(open_server: FrontendProcess, peer: EnginePeer, stream: bool) -> None:
    peer.token_of = script(ids_of("<think>\n" + "one " * 100))
    reasoning, content, reason = ask(open_server.url, stream)
    assert reasoning is not None and reasoning.startswith("one one ") and (content, reason) == ("", "length")


def test_thoughts_go_back_into_the_prompt(open_server: FrontendProcess, peer: EnginePeer) -> None:
    said = {"role": "assistant", "content": "Two.", "reasoning_content": "hm"}
    ask(open_server.url, False, [*CHAT, said, *CHAT])
    assert "assistant: <think>\nhm\n</think>\n\nTwo.\n" in prompt_sent(peer)


def test_other_models_have_no_reasoning(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(ids_of("<think>hm</think>Two"))
    message = sdk.chat.completions.create(model="default", messages=CHAT).choices[0].message.model_dump()
    assert message["content"] == "<think>hm</think>Two" and "reasoning_content" not in message
