"""`/v1/responses` through the `openai` client: what the model is shown, the answer, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from tests.frontend.test_abort import abort
from tests.frontend.test_bad_requests import said
from tests.frontend.test_tools import PARAMETERS, PARIS, QWEN_CALL, QWEN_TIME, GetWeather, params, prompt
from tests.support.demo import ids_of
from tests.support.engine_peer import EnginePeer, script
from tests.support.frontend_process import FrontendProcess
from tests.support.tool_model import marked_ids
from tests.support.walk import accepted
from toka.messages import Cancel, Submit

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Of a city.",
    "parameters": PARAMETERS,
    "strict": False,
}
TIME: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": None, "strict": False}
LOGPROBS: list[Any] = ["message.output_text.logprobs"]


class City(BaseModel):
    name: str
    size: Literal["small", "large"]


def create(sdk: openai.OpenAI, input: Any = "Hello", **fields: Any) -> Response:
    answer = sdk.responses.create(model="default", input=input, **fields)
    assert isinstance(answer, Response)
    return answer


def events_of(sdk: openai.OpenAI, input: Any = "Hello", **fields: Any) -> list[Any]:
    """The events of a stream, numbered as they should be."""
    events = list(sdk.responses.create(model="default", input=input, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == events[1].response.status == "in_progress"
    return events


def shape(answer: Response) -> list[tuple[str, Any]]:
    """The kind and the content of each item."""
    found: list[tuple[str, Any]] = []
    for item in answer.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        else:
            assert item.type in ("message", "reasoning")
            found.append((item.type, "".join(part.text for part in item.content or [])))  # type: ignore[union-attr]
    return found


def test_an_answer(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of, peer.cached = script(ids_of("Hi there.")), 3
    answer = create(sdk, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert answer.output_text == "Hi there." and answer.status == "completed" and answer.id.startswith("resp_")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert answer.model_dump()["store"] is False and answer.error is None and answer.incomplete_details is None
    (item,) = answer.output
    assert item.type == "message" and item.status == "completed" and item.id.startswith("msg_")
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens == len(ids_of("Hi there.")) + 1
    assert prompt(peer).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
    assert params(peer).temperature == 0.5 and params(peer).logprobs == -1
    for cut in (create(sdk, max_output_tokens=1), events_of(sdk, max_output_tokens=1)[-1].response):
        assert (cut.status, cut.output_text, cut.output[0].status) == ("incomplete", "Hi", "incomplete")
        assert cut.incomplete_details.reason == "max_output_tokens"
    peer.token_of = script([])
    assert shape(create(sdk)) == shape(events_of(sdk)[-1].response) == [("message", "")]


def test_the_events_of_a_text(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(ids_of("Hi there 🦜."))
    events = events_of(sdk)
    kinds = [event.type.removeprefix("response.") for event in events[2:]]
    deltas = kinds.count("output_text.delta")
    assert deltas > 2 and kinds == [
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    added, part, *texts, done, part_done, item_done, completed = events[2:]
    assert added.item.content == [] and part.part.text == "" and added.item.status == "in_progress"
    assert "".join(event.delta for event in texts) == done.text == part_done.part.text == "Hi there 🦜."
    assert {event.item_id for event in [part, *texts, done]} == {added.item.id}
    assert completed.response.output == [item_done.item] and completed.response.usage.output_tokens > 0
    assert completed.response.id == events[0].response.id


def test_the_lines_of_a_stream(frontend: FrontendProcess, peer: EnginePeer) -> None:
    """Names in `event` lines as well, no [DONE], and comment lines in silence."""
    peer.token_of, peer.paused = script(ids_of("Hi")), True
    body = {"input": "Hello", "stream": True}
    with httpx.stream("POST", f"{frontend.url}{PATH}", json=body, timeout=30) as response:
        lines = response.iter_lines()
        begun = [line for line in (next(lines) for _ in range(10)) if line]
        peer.paused = False
        ended = [line for line in lines if line]
    named = [line.removeprefix("event: ") for line in begun + ended if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in begun + ended if line.startswith("data: ")]
    assert named == [event["type"] for event in data] and begun[4:] == [": ping"] * 2
    assert named[:2] == ["response.created", "response.in_progress"] and named[-1] == "response.completed"


def test_a_client_that_is_gone_cancels(frontend: FrontendProcess, peer: EnginePeer) -> None:
    peer.step_seconds = 0.02
    with httpx.stream("POST", f"{frontend.url}{PATH}", json={"input": "Hello", "stream": True}) as response:
        next(response.iter_lines())
    assert len(peer.wait_for(Cancel)) == 1


def test_an_end_by_others(http: httpx.Client, sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.step_seconds = 0.01
    stream = iter(sdk.responses.create(model="default", input="Hello", stream=True))
    created: Any = next(stream)
    abort(http, {"request_id": created.response.id})
    last: Any = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    *_, part, last = _ended_by(peer, sdk)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error" and last.sequence_number == part.sequence_number + 1


def _ended_by(peer: EnginePeer, sdk: openai.OpenAI) -> list[Any]:
    """The events of a stream in which the engine fails."""
    stream = iter(sdk.responses.create(model="default", input="Hello", stream=True))
    begun = [next(stream) for _ in range(5)]
    peer.abort_all()
    return [*begun, *stream]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(sdk: openai.OpenAI, peer: EnginePeer, stream: bool) -> None:
    peer.token_of = script(ids_of("Hi 🦜 there."))
    fields: dict[str, Any] = {"include": LOGPROBS, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}
    deltas: list[Any] = []
    if stream:
        events = events_of(sdk, **fields)
        deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
        answer = events[-1].response
    else:
        answer = create(sdk, **fields)
    found = answer.output[0].content[0].logprobs
    assert [each.bytes for each in found][:1] == [list(b"Hi")] and all(len(each.top_logprobs) == 2 for each in found)
    assert not stream or [each.token for each in deltas] == [each.token for each in found]
    ids = answer.model_dump()
    assert ids["token_ids"] == [*ids_of("Hi 🦜 there."), 2] and len(found) == len(ids["token_ids"])
    assert ids["prompt_token_ids"] and answer.usage.output_tokens == len(found)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls(tool_sdk: openai.OpenAI, peer: EnginePeer, stream: bool) -> None:
    text = f"<think>\nhm so\n</think>\n\nLet me see.\n{QWEN_CALL}\n{QWEN_TIME}"
    peer.token_of = script(marked_ids(text))
    fields: dict[str, Any] = {"tools": [WEATHER, TIME], "include": LOGPROBS}
    events = events_of(tool_sdk, **fields) if stream else []
    answer = events[-1].response if stream else create(tool_sdk, **fields)
    assert shape(answer) == [
        ("reasoning", "hm so"),
        ("message", "Let me see."),
        ("get_weather", PARIS),
        ("get_time", "{}"),
    ]
    assert answer.status == "completed" and {item.status for item in answer.output} == {"completed"}
    assert "".join(each.token for each in answer.output[1].content[0].logprobs) == "Let me see."
    thoughts = answer.usage.output_tokens_details.reasoning_tokens
    assert thoughts == len(marked_ids("<think>\nhm so\n</think>"))
    if not stream:
        return
    arguments: dict[int, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
        elif event.type == "response.function_call_arguments.done":
            assert arguments[event.output_index] == event.arguments
    assert list(arguments.values()) == [PARIS, "{}"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == answer.output
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm so"


def test_a_round_with_tools(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(marked_ids(f"<think>\nhm so\n</think>\n\nLet me see.\n{QWEN_CALL}"))
    chat: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    ]
    answer = create(tool_sdk, chat, tools=[WEATHER], tool_choice="auto")
    call = answer.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    chat += answer.output
    chat.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain"})
    peer.token_of = script(marked_ids("Bring an umbrella."))
    assert create(tool_sdk, chat, tools=[WEATHER]).output_text == "Bring an umbrella."
    assert f"<|im_start|>assistant\nLet me see.\n{QWEN_CALL}<|im_end|>\n<|im_start|>tool\nRain" in prompt(peer)
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?" in prompt(peer)
    assert '"description": "Of a city."' in prompt(peer)
    ended = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    create(tool_sdk, ended)
    assert prompt(peer).endswith("assistant\nHi<|im_end|>\n<|im_start|>assistant\n"), "a turn of its own"


def test_thoughts_go_back_to_the_turn_they_were_of(open_server: FrontendProcess, peer: EnginePeer) -> None:
    template = "{% for each in messages %}[{{ each.role }}|{{ each.reasoning_content }}|{{ each.content }}]{% endfor %}"
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
        {"role": "assistant", "content": "Two."},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "Three?"},
    ]
    body = {"input": items, "chat_template": template, "max_output_tokens": 1}
    assert httpx.post(f"{open_server.url}{PATH}", json=body).status_code == 200
    assert prompt(peer) == "[assistant|hm|One.][assistant||Two.][assistant||][user||Three?]"


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"tools": [WEATHER]}, False),
        ({"tools": [{**WEATHER, "strict": None}]}, True),
        ({"tools": [{key: value for key, value in WEATHER.items() if key != "strict"}]}, True),
        ({"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "name": "get_weather"}}, True),
        ({"tools": [WEATHER, TIME], "parallel_tool_calls": False}, True),
        (
            {
                "tools": [WEATHER, TIME],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "get_weather"}],
                },
            },
            True,
        ),
        ({"tools": [], "parallel_tool_calls": False, "tool_choice": "auto"}, False),
    ],
)
def test_when_calls_are_held_to_a_grammar(
    tool_sdk: openai.OpenAI, peer: EnginePeer, fields: dict[str, Any], held: bool
) -> None:
    peer.token_of = script(marked_ids(QWEN_CALL))
    answer = create(tool_sdk, **fields)
    assert bool(params(peer).grammar) == held and (not held or accepted(params(peer).grammar, QWEN_CALL))
    if fields["tools"]:
        assert shape(answer) == [("get_weather", PARIS)]


def test_the_sdks_helpers(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    text = '{"name":"Rome","size":"large"}'
    peer.token_of = script(marked_ids(text))
    parsed = tool_sdk.responses.parse(model="default", input="A city", text_format=City)
    assert parsed.output_parsed == City(name="Rome", size="large")
    assert accepted(params(peer).grammar, text) and not accepted(params(peer).grammar, text.replace("large", "big"))
    with tool_sdk.responses.stream(model="default", input="A city", text_format=City) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert kinds[-1] == "response.completed"
    again: list[Any] = [*parsed.output, {"role": "user", "content": "Another"}]
    assert create(tool_sdk, again, text={"format": {"type": "json_object"}}).output_text == text
    peer.token_of = script(marked_ids(QWEN_CALL))
    tool: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]
    tools: list[Any] = [{"type": "function", **tool}]
    with tool_sdk.responses.stream(model="default", input="Weather?", tools=tools) as stream:
        (done,) = [event for event in stream if event.type == "response.function_call_arguments.done"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and call.parsed_arguments == {"city": "Paris"} and done.arguments == PARIS
    with tool_sdk.responses.stream(model="default", input="Weather?", max_output_tokens=1) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_what_is_not_kept_cannot_be_had(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        sdk.responses.delete("resp_1")
    with pytest.raises(openai.BadRequestError, match="nothing is kept"):
        create(sdk, store=True)
    assert create(sdk, store=False, max_output_tokens=1).status == "incomplete"


def item(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, fields]


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
FORM = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
BAD: list[tuple[str, Any, str]] = [
    ("input", None, "input"),
    ("input", "", "input"),
    ("input", [], "input"),
    ("input", item(content="a"), "input[1].role"),
    ("input", item(role="user"), "input[1].content"),
    ("input", item(role="tool", content="a"), "input[1].role"),
    ("input", item(role="user", content=[{"type": "input_image", "image_url": "x"}]), "input[1].content[0].type"),
    ("input", item(role="user", content=[{"type": "input_text"}]), "input[1].content[0].text"),
    ("input", item(type="item_reference", id="msg_1"), "input[1].type"),
    ("input", item(type="computer_call_output", call_id="1", output="a"), "input[1].type"),
    ("input", item(type="function_call_output", output="a"), "input[1].call_id"),
    ("input", item(type="function_call_output", call_id="1"), "input[1].output"),
    ("input", item(**CALL | {"arguments": "[1]"}), "input[1].arguments"),
    ("input", item(**CALL | {"name": None}), "input[1].name"),
    ("input", item(mood="a"), "input[1].mood"),
    ("input", [CALL] * 129, "input[128]"),
    ("input", "word " * 9000, "input"),
    ("max_output_tokens", 0, "max_output_tokens"),
    ("max_output_tokens", 9000, "max_output_tokens"),
    ("max_tokens", 5, "max_tokens"),
    ("messages", [], "messages"),
    ("n", 1, "n"),
    ("response_format", {"type": "text"}, "response_format"),
    ("temperature", 3, "temperature"),
    ("min_tokens", 5, "min_tokens"),
    ("top_logprobs", 2, "top_logprobs"),
    ("include", ["file_search_call.results"], "include[0]"),
    ("stream_options", {"include_obfuscation": False}, "stream_options"),
    ("store", True, "store"),
    ("background", True, "background"),
    ("truncation", "auto", "truncation"),
    ("tools", [{"type": "web_search"}], "tools[0].type"),
    ("tools", [WEATHER, WEATHER], "tools[1].name"),
    ("tools", [{"type": "function", "name": "a b"}], "tools[0].name"),
    ("tools", [{**WEATHER, "parameters": {"type": "array"}}], "tools[0].parameters"),
    ("tools", [{**WEATHER, "parameters": {"not": {}}, "strict": True}], "tools[0].parameters"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function"}, "tool_choice.name"),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
    ("text", {"format": {**FORM, "schema": {"not": {}}}}, "text.format"),
    ("text", {"format": {"type": "json_schema", "name": "a"}}, "text.format.schema"),
    ("text", {"format": {**FORM, "name": None}}, "text.format.name"),
    ("text", {"format": {**FORM, "type": "text"}}, "text.format.schema"),
    ("text", {"verbosity": "low"}, "text.verbosity"),
    ("nonsense", 1, "nonsense"),
    *[
        (field, value, field)
        for field, value in {
            "conversation": "conv_1",
            "max_tool_calls": 1,
            "moderation": {},
            "previous_response_id": "resp_1",
            "prompt": {"id": "a"},
            "prompt_cache_retention": "24h",
            "reasoning": {"effort": "low"},
        }.items()
    ],
]


@pytest.mark.parametrize(("field", "value", "param"), BAD)
def test_each_wrong_field_is_named(http: httpx.Client, peer: EnginePeer, field: str, value: Any, param: str) -> None:
    error = said(http.post(PATH, json={"input": "Hello", "max_output_tokens": 2, field: value}), 400, param)
    assert error["message"].startswith(param) and not peer.of(Submit)


def test_a_choice_that_is_none_of_the_tools(http: httpx.Client) -> None:
    function = {"type": "function", "name": "f"}
    body: dict[str, Any] = {"input": "Hello", "tools": [WEATHER]}
    said(http.post(PATH, json=body | {"tool_choice": function}), 400, "tool_choice.name")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [function]}
    said(http.post(PATH, json=body | {"tool_choice": allowed}), 400, "tool_choice.tools[0].name")
    said(http.post(PATH, json=body | {"model": "gpt-5"}), 404, "model")
