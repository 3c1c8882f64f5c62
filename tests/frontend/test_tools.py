"""Tools through the `openai` client: what the model is shown and held to, and what becomes of what it writes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.frontend.test_bad_requests import said
from tests.support.engine_peer import EnginePeer, script
from tests.support.frontend_process import FrontendProcess
from tests.support.tool_model import LLAMA, marked_ids
from tests.support.walk import accepted, marked_tokenizer
from toka.messages import SamplingParams, Submit, Work, decode

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a city.", "parameters": PARAMETERS},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
STRICT: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
PARIS = '{"city": "Paris"}'
QWEN_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QWEN_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
LLAMA_TIME = '{"name": "get_time", "parameters": {}}'
Answer = tuple[str | None, list[tuple[str, str]], str | None]
"""Content, calls, finish reason."""


def work(peer: EnginePeer) -> Work:
    found = decode(peer.of(Submit)[-1].payload)
    assert isinstance(found, Work)
    return found


def params(peer: EnginePeer) -> SamplingParams:
    return work(peer).params


def prompt(peer: EnginePeer) -> str:
    return str(marked_tokenizer().decode(work(peer).prompt.tolist(), skip_special_tokens=False))


def ask(sdk: openai.OpenAI, stream: bool, *, llama: bool = False, **more: Any) -> Answer:
    fields: dict[str, Any] = {"model": "default", "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 200, **more}
    if llama:
        fields["extra_body"] = {"chat_template": LLAMA}
    if not stream:
        choice = sdk.chat.completions.create(**fields).choices[0]
        calls = choice.message.tool_calls or []
        assert all(call.id.startswith("call_") for call in calls) and len({call.id for call in calls}) == len(calls)
        named = [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
        return choice.message.content, named, choice.finish_reason
    return streamed(list(sdk.chat.completions.create(**fields, stream=True)))


def streamed(chunks: list[Any]) -> Answer:
    """Checks that calls come as OpenAI's do."""
    content, calls, reason = "", list[tuple[str, str]](), None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        assert reason is None, "the reason is last"
        reason = choice.finish_reason
        for delta in choice.delta.tool_calls or []:
            if delta.id is not None:
                assert delta.id.startswith("call_") and delta.type == "function" and delta.function.arguments == ""
                calls.append((delta.function.name, ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.function.arguments)
    return content or None, calls, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("llama", [False, True])
def test_text_and_calls(tool_sdk: openai.OpenAI, peer: EnginePeer, stream: bool, llama: bool) -> None:
    text = f"Hm.<|python_tag|>{LLAMA_CALL}; {LLAMA_TIME}" if llama else f"Hm.\n{QWEN_CALL}\n{QWEN_TIME}"
    peer.token_of = script(marked_ids(text))
    calls = [("get_weather", PARIS), ("get_time", "{}")]
    assert ask(tool_sdk, stream, llama=llama) == ("Hm.", calls, "tool_calls")
    peer.token_of = script(marked_ids(text.removeprefix("Hm.")))
    assert ask(tool_sdk, stream, llama=llama) == (None, calls, "tool_calls")
    assert ask(tool_sdk, stream, llama=llama, tool_choice="none")[1:] == ([], "stop")
    peer.token_of = script(marked_ids(LLAMA_CALL if llama else QWEN_CALL))
    assert ask(tool_sdk, stream, llama=llama, tool_choice=NAMED) == (None, calls[:1], "stop"), "as OpenAI has it"
    peer.token_of = script(marked_ids("No < tool"))
    assert ask(tool_sdk, stream, llama=llama) == ("No < tool", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cut(tool_sdk: openai.OpenAI, peer: EnginePeer, stream: bool) -> None:
    whole = marked_ids(f"{QWEN_CALL}\n{QWEN_CALL}")
    peer.token_of = script(whole)
    most = len(marked_ids(f"{QWEN_CALL}\n" + QWEN_CALL.partition('"Paris"')[0]))
    calls = [("get_weather", PARIS), ("get_weather", '{"city": "')]
    assert ask(tool_sdk, stream, max_tokens=most) == (None, calls, "length")
    assert ask(tool_sdk, stream, max_tokens=len(whole)) == (None, [("get_weather", PARIS)] * 2, "length")
    assert ask(tool_sdk, stream, stop="Paris", tool_choice="required")[1:] == ([("get_weather", '{"city": "')], "stop")


def test_streamed_arguments_come_as_they_are_written(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(marked_ids(QWEN_CALL.replace("Paris", "Paris and then some more " * 3)))
    stream = tool_sdk.chat.completions.create(model="default", messages=ASK, tools=[WEATHER], stream=True)  # type: ignore[call-overload]
    deltas = [delta for chunk in stream for delta in chunk.choices[0].delta.tool_calls or []]
    assert len(deltas) > 10


class GetWeather(BaseModel):
    city: str


@pytest.mark.parametrize("llama", [False, True])
def test_the_sdks_helpers(tool_sdk: openai.OpenAI, peer: EnginePeer, llama: bool) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    peer.token_of = script(marked_ids(LLAMA_CALL if llama else QWEN_CALL))
    more: dict[str, Any] = {"extra_body": {"chat_template": LLAMA}} if llama else {}
    parsed = tool_sdk.chat.completions.parse(model="default", messages=ASK, tools=[tool], **more)
    (call,) = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris") and params(peer).grammar
    with tool_sdk.chat.completions.stream(model="default", messages=ASK, tools=[tool], **more) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments, event.parsed_arguments) for event in done] == [
        ("get_weather", PARIS, GetWeather(city="Paris"))
    ]
    message = stream.get_final_completion().choices[0].message
    assert message.content is None
    for said_before in (parsed.choices[0].message, message):
        (call,) = said_before.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
        peer.token_of = script(marked_ids("Bring an umbrella."))
        chat = [*ASK, said_before, result]
        more_tools: dict[str, Any] = {"tools": [tool], **more}
        answer = tool_sdk.chat.completions.create(model="default", messages=chat, **more_tools)
        assert answer.choices[0].message.content == "Bring an umbrella."
        assert (LLAMA_CALL if llama else QWEN_CALL) in prompt(peer) and "Rain" in prompt(peer)


def test_ids_and_logprobs_stay_one_to_one(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    ids = marked_ids(f"Hm.\n{QWEN_CALL}\n{QWEN_TIME}")
    peer.token_of = script(ids)
    fields: dict[str, Any] = {"model": "default", "messages": ASK, "tools": [WEATHER, TIME], "logprobs": True}
    extra = {"return_token_ids": True}
    choice = tool_sdk.chat.completions.create(**fields, extra_body=extra).choices[0]
    assert choice.model_dump()["token_ids"] == [*ids, 2] and choice.logprobs is not None
    assert len(choice.logprobs.content or []) == len(ids) + 1
    chunks = list(tool_sdk.chat.completions.create(**fields, stream=True, extra_body=extra))
    assert [number for chunk in chunks for number in chunk.choices[0].model_dump()["token_ids"]] == [*ids, 2]
    for chunk in chunks:
        found = chunk.choices[0]
        assert len((found.logprobs and found.logprobs.content) or []) == len(found.model_dump()["token_ids"])


def test_what_a_model_is_shown(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Köln"}'}}
    chat = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"id": "call_1", **call}, {"id": "call_2", **call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]
    ask(tool_sdk, False, messages=chat, tools=[STRICT, TIME])
    shown = prompt(peer)
    assert json.dumps(WEATHER) + "\n" in shown and '"parameters": {"type": "object", "properties": {}' in shown
    assert "strict" not in shown
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n\n{written}\n{written}<|im_end|>\n<|im_start|>tool\nRain<|im_end|>" in shown
    ask(tool_sdk, False, messages=chat, tools=[WEATHER], llama=True)
    assert prompt(peer).count('assistant: {"name": "get_weather", "parameters": {"city": "Köln"}}') == 2
    ask(tool_sdk, False, messages=chat, tool_choice="none")
    assert "# Tools" not in prompt(peer) and written in prompt(peer)


def test_a_model_whose_template_knows_no_tools(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(marked_plain(QWEN_CALL))
    assert ask(sdk, False, tool_choice="required") == (None, [("get_weather", PARIS)], "tool_calls")
    assert accepted(params(peer).grammar, QWEN_CALL.replace("Paris", "Köln")) is False, "spelled, not a token"
    assert f"<tools>\n{json.dumps(WEATHER)}\n" in prompt(peer)
    answer = sdk.chat.completions.create(model="default", messages=ASK, tools=[WEATHER])  # type: ignore[call-overload]
    result = {"role": "tool", "tool_call_id": "1", "content": "Rain"}
    system = {"role": "system", "content": "Be brief."}
    ask(sdk, True, messages=[system, *ASK, answer.choices[0].message, result])
    assert prompt(peer).startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert f"<|im_start|>assistant\n{QWEN_CALL}<|im_end|>\n<|im_start|>tool\nRain" in prompt(peer)


def marked_plain(text: str) -> list[int]:
    from tests.support.demo import ids_of

    return ids_of(text)


def test_when_calls_are_held_to_a_grammar(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(marked_ids(QWEN_CALL))
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    for fields, held in (
        ({}, False),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, False),
        ({"tool_choice": "none", "tools": [STRICT]}, False),
        ({"tools": [STRICT, TIME]}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": NAMED}, True),
        ({"tool_choice": allowed}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ):
        ask(tool_sdk, False, **fields)
        assert bool(params(peer).grammar) == held and params(peer).grammar_after == -1
        assert not held or accepted(params(peer).grammar, f"<think>\nhm</think>\n{QWEN_CALL}")
    close = marked_tokenizer().token_to_id("</think>")
    for thinking, after in ((True, close), (False, -1)):
        fields = {"extra_body": {"chat_template_kwargs": {"thinking": thinking}}}
        peer.token_of = script(marked_ids(f"hm\n</think>\n\n{QWEN_CALL}" if thinking else QWEN_CALL))
        for stream in (False, True):
            answer = ask(tool_sdk, stream, tool_choice="required", **fields)
            assert answer == (None, [("get_weather", PARIS)], "tool_calls")
            assert params(peer).grammar_after == after
            assert accepted(params(peer).grammar, "\n\n" * thinking + QWEN_CALL)


def test_several_choices(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(marked_ids(QWEN_CALL))
    choices = tool_sdk.chat.completions.create(model="default", messages=ASK, tools=[WEATHER], n=3).choices  # type: ignore[call-overload]
    calls = [call for choice in choices for call in choice.message.tool_calls]
    assert [call.function.arguments for call in calls] == [PARIS] * 3 and len({call.id for call in calls}) == 3


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def reply(**call: Any) -> list[Any]:
    whole = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    calls = [{key: value for key, value in whole.items() if value is not None}]
    return [*ASK, {"role": "assistant", "tool_calls": calls}, *ASK]


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [tool()] * 129}, "tools"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(returns={})]}, "tools[0].function.returns"),
    ({"tools": [tool(parameters=UNIQUE, strict=True)]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters=DEEP, strict=True)]}, "tools[0].function.parameters"),
    ({"tools": [WEATHER, tool(parameters=UNIQUE)], "tool_choice": "required"}, "tools[1].function.parameters"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [tool()], "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": [tool()], "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.type"),
    (
        {
            "tools": [tool()],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        },
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [tool(strict=True)], "ignore_eos": True}, "ignore_eos"),
    ({"tools": [tool(strict=True)], "min_tokens": 2}, "min_tokens"),
    ({"tools": [tool()], "regex": "a"}, "regex"),
    ({"tools": [tool()], "grammar": 'start: "a"'}, "grammar"),
    (
        {"tools": [tool()], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"messages": reply(id=None)}, "messages[1].tool_calls[0].id"),
    ({"messages": reply(type="custom")}, "messages[1].tool_calls[0].type"),
    ({"messages": reply(function={"name": "f"})}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": reply(function={"name": "", "arguments": "{}"})}, "messages[1].tool_calls[0].function.name"),
    (
        {"messages": reply(function={"name": "f", "arguments": "[1]"})},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {"messages": reply(function={"name": "f", "arguments": "{'a'"})},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": reply()[1]["tool_calls"]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": reply()[:2], "continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_each_wrong_field_is_named(
    frontend: FrontendProcess, peer: EnginePeer, fields: dict[str, Any], param: str
) -> None:
    said(httpx.post(f"{frontend.url}/v1/chat/completions", json={"messages": ASK} | fields), 400, param)
    assert not peer.of(Submit)


def test_a_call_that_is_the_last_message_is_not_continued(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    ask(tool_sdk, False, messages=reply()[:2])
    assert prompt(peer).endswith("</tool_call><|im_end|>\n<|im_start|>assistant\n")
