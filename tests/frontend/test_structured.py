"""`response_format`, `regex` and `grammar`: what reaches the engine, what is refused, and what the client has of it."""

from __future__ import annotations

import json
import threading
from typing import Any, Literal

import httpx
import openai
import psutil
import pytest
from pydantic import BaseModel, Field

from tests.frontend.test_bad_requests import said
from tests.frontend.test_tools import ASK, PARIS, QWEN_CALL, ask, params
from tests.support.engine_peer import EnginePeer, script
from tests.support.frontend_process import FrontendProcess
from tests.support.tool_model import marked_ids
from tests.support.walk import accepted, marked_tokenizer
from toka.messages import Submit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, COMPLETIONS: {"prompt": "Hello"}}


class Item(BaseModel):
    name: str
    kind: Literal["fruit", "bread"]
    parts: list[Item] = Field(max_length=3)


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value, **more}}}


def test_a_model_of_the_client(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    text = '{"name":"apple","kind":"fruit","parts":[{"name":"","kind":"bread","parts":[]}]}'
    peer.token_of = script(marked_ids(text))
    parsed = sdk.chat.completions.parse(model="default", messages=ASK, response_format=Item).choices[0].message
    assert parsed.parsed == Item.model_validate_json(text)
    with sdk.chat.completions.stream(model="default", messages=ASK, response_format=Item) as stream:
        stream.until_done()
    message = stream.get_final_completion().choices[0].message
    assert message.parsed == parsed.parsed
    grammar = params(peer).grammar
    assert accepted(grammar, text) and not accepted(grammar, text.replace("fruit", "fish"))
    assert not accepted(grammar, text.replace(",", ", ")), "compact"
    sdk.chat.completions.create(model="default", messages=[*ASK, parsed, *ASK, message, *ASK])
    assert params(peer).grammar == ""


def test_an_answer_that_is_cut(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(marked_ids('{"name":"apple"'))
    fields: dict[str, Any] = {"model": "default", "messages": ASK, "max_tokens": 3}
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(**fields, response_format=Item)
    choice = sdk.chat.completions.create(**fields, response_format={"type": "json_object"}).choices[0]
    assert choice.finish_reason == "length" and choice.message.content == '{"name":"'


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("fields", "fits", "fails"),
    [
        (schema({"type": "object"}, strict=True, description="d"), '{"a":[1]}', "[1]"),
        (schema({"type": "array", "items": {"enum": ["a", 1]}}), '["a",1]', '["b"]'),
        ({"response_format": {"type": "json_object"}}, '{"a":[1]}', '{"a": [1]}'),
        ({"regex": "[a-c]+/"}, "abc/", "abd/"),
        ({"grammar": 'start: "a" | "b" start'}, "bba", "bb"),
    ],
)
def test_what_reaches_the_engine(
    http: httpx.Client, peer: EnginePeer, route: str, fields: Any, fits: str, fails: str
) -> None:
    assert http.post(route, json=BODIES[route] | fields | {"max_tokens": 1}).status_code == 200
    assert accepted(params(peer).grammar, fits) and not accepted(params(peer).grammar, fails)
    assert params(peer).grammar_after == -1


def test_text_is_held_to_nothing(http: httpx.Client, peer: EnginePeer) -> None:
    for route, body in BODIES.items():
        http.post(route, json=body | {"response_format": {"type": "text"}, "regex": None, "max_tokens": 1})
        assert params(peer).grammar == ""


def test_the_grammar_begins_behind_thoughts(tool_sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(marked_ids('hm {\n</think>\n\n{"a":1}'))
    fields: dict[str, Any] = {"model": "default", "messages": ASK, "response_format": {"type": "json_object"}}
    cases = [
        ({"thinking": True}, [], '\n\n{"a":1}', marked_tokenizer().token_to_id("</think>")),
        ({"thinking": False}, [], '{"a":1}', -1),
        ({}, [], '<think>hm {\n</think>\n{"a":1}', -1),
        ({}, [{"role": "assistant", "content": "<think>So"}], '{"a":1}', marked_tokenizer().token_to_id("</think>")),
        ({}, [{"role": "assistant", "content": "So: "}], '{"a":1}', -1),
    ]
    for variables, begun, fits, after in cases:
        extra = {"chat_template_kwargs": variables}
        fields["messages"] = [*ASK, *begun]
        message = tool_sdk.chat.completions.create(**fields, extra_body=extra).choices[0].message.model_dump()
        assert accepted(params(peer).grammar, fits) and not accepted(params(peer).grammar, "hm {\n</think>{}")
        assert params(peer).grammar_after == after
        if after >= 0:
            assert (message["reasoning_content"], message["content"]) == ("hm {", '{"a":1}')


@pytest.mark.parametrize("stream", [False, True])
def test_tools_or_an_answer_of_a_form(tool_sdk: openai.OpenAI, peer: EnginePeer, stream: bool) -> None:
    form = {"type": "json_object"}
    peer.token_of = script(marked_ids(QWEN_CALL))
    assert ask(tool_sdk, stream, response_format=form) == (None, [("get_weather", PARIS)], "tool_calls")
    peer.token_of = script(marked_ids('{"a":1}'))
    assert ask(tool_sdk, stream, response_format=form) == ('{"a":1}', [], "stop")
    for text, fits in ((QWEN_CALL, True), ('{"a":1}', True), ("Hi", False)):
        assert accepted(params(peer).grammar, text) == fits
    assert ask(tool_sdk, stream, response_format=form, tool_choice="none") == ('{"a":1}', [], "stop")
    assert not accepted(params(peer).grammar, QWEN_CALL)


DEEP = json.loads('{"items":' * 300 + "{}" + "}" * 300)
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "expected `object`"),
    ({"response_format": {}}, "response_format.type", "missing"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "",
    ),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", "needs the type"),
    (schema(True), "response_format.json_schema.schema", "object"),
    (schema({}, strict="yes"), "response_format.json_schema.strict", "bool"),
    (schema({}, more=1), "response_format.json_schema.more", "unknown"),
    (schema({"type": "array", "contains": {}}), "response_format", "contains"),
    (schema({"properties": {"a": {"if": {}, "then": {}}}}), "response_format", "if"),
    (schema({"type": "text"}), "response_format", "Invalid type: text"),
    (schema({"type": "string", "format": "colour"}), "response_format", "format: colour"),
    (schema({"$ref": "https://example.org/schema"}), "response_format", "$ref"),
    (schema({"$ref": "#"}), "response_format", "nothing can match"),
    (schema({"type": "string", "pattern": "(a"}), "response_format", "pattern"),
    (schema(DEEP), "response_format", "nested too deeply"),
    (schema({"minimum": 10**400}), "response_format", ""),
    (schema({"enum": ["x" * 600_000]}), "response_format", "at most"),
    ({"regex": ""}, "regex", "length"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": "a\\"}, "regex", "escape"),
    ({"regex": "(?<=a)b"}, "regex", "look"),
    ({"regex": 5}, "regex", ""),
    ({"regex": "a" * 65_537}, "regex", "length"),
    ({"grammar": "start: nothing"}, "grammar", "nothing"),
    ({"grammar": "begin: 'a'"}, "grammar", ""),
    ({"grammar": "start: @body"}, "grammar", ""),
    ({"grammar": 'start: "a"', "regex": "a"}, "grammar", "excludes regex"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "excludes response_format"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "end-of-sequence"),
    (schema({}) | {"min_tokens": 1}, "min_tokens", "end-of-sequence"),
]


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(("fields", "param", "why"), BAD)
def test_each_wrong_field_is_named(
    frontend: FrontendProcess, peer: EnginePeer, route: str, fields: dict[str, Any], param: str, why: str
) -> None:
    error = said(httpx.post(f"{frontend.url}{route}", json=BODIES[route] | {"max_tokens": 2} | fields), 400, param)
    assert why in error["message"] and len(error["message"]) < 500
    assert not peer.of(Submit)


@pytest.mark.parametrize("levels", [400, 800, 900, 940, 960, 980, 2000])
def test_depth_is_an_error_of_the_client(frontend: FrontendProcess, levels: int) -> None:
    deep = '{"items":' * levels + "1" + "}" * levels
    constant = '{"const":' + "[" * levels + "]" * levels + "}"
    fields = []
    for nested in (deep, constant):
        fields += [
            f'"response_format":{{"type":"json_schema","json_schema":{{"schema":{nested}}}}}',
            f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{nested}}}}}]',
            f'"tool_choice":"required","tools":[{{"type":"function","function":{{"name":"f","parameters":{nested}}}}}]',
        ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    fields.append('"messages":' + json.dumps([{"role": "assistant", "tool_calls": [call]}]))
    for each in fields:
        body = f'{{"max_tokens":1,"messages":{json.dumps(ASK)},{each}}}'
        answer = httpx.post(f"{frontend.url}{CHAT}", content=body)
        assert answer.status_code in (200, 400), answer.text


def test_the_process_behind_ends_with_the_frontend(peer: EnginePeer) -> None:
    with FrontendProcess(peer.endpoint) as frontend:
        frontend.wait_until_serving()
        httpx.post(f"{frontend.url}{CHAT}", json=BODIES[CHAT] | {"regex": "a", "max_tokens": 1})
        (child,) = psutil.Process(frontend.process.pid).children()
        frontend.process.kill()
        assert child.wait(10) is None or not child.is_running()


def test_what_takes_too_long_is_refused_while_others_are_served(http: httpx.Client, peer: EnginePeer) -> None:
    slow = schema({"allOf": [{"pattern": f"x{{{number}}}.*y"} for number in range(1, 40)]})
    with httpx.Client(base_url=http.base_url, timeout=30) as other:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(other.post(CHAT, json=BODIES[CHAT] | slow)))
        thread.start()
        while thread.is_alive():
            assert http.post(CHAT, json=BODIES[CHAT] | {"max_tokens": 1}).elapsed.total_seconds() < 1
        assert "too much time or memory" in said(answers[0], 400, "response_format")["message"]
