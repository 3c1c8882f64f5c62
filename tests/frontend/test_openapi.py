"""/openapi.json and /docs: that they say what there is, and that answers are as they say."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
import zmq

from frontend.answer_schema import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, Error
from frontend.app import make_app
from frontend.engine import Engine
from frontend.routes import routes
from frontend.service import Service
from tests.frontend.test_reasoning import CHAT, TEMPLATE
from tests.support.demo import ids_of
from tests.support.engine_peer import EnginePeer, script
from tests.support.frontend_process import FrontendProcess
from toka.config import Config

EVERYTHING: list[dict[str, Any]] = [
    {"max_tokens": 3},
    {"max_tokens": 40, "stop": "e", "n": 3, "return_token_ids": True},
    {"max_tokens": 3, "logprobs": 2, "stream_options": {"include_usage": True}},
    {"max_tokens": 3, "logprobs": 0, "return_token_ids": True, "request_id": "mine"},
]
FORMS: list[tuple[str, dict[str, Any], type[msgspec.Struct], type[msgspec.Struct]]] = [
    ("/v1/completions", {"prompt": ["One", "Two"]}, Completion, CompletionChunk),
    ("/v1/completions", {"prompt": "One", "echo": True, "logprobs": None}, Completion, CompletionChunk),
    ("/v1/chat/completions", {"messages": CHAT}, ChatCompletion, ChatCompletionChunk),
]


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/openapi.json")
    assert answer.headers["Content-Type"] == "application/json"
    return answer.json()  # type: ignore[no-any-return]


def test_it_is_openapi(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()


async def test_every_route_is_declared_and_described(document: dict[str, Any]) -> None:
    with zmq.Context() as context:
        service = Service(Config(), Engine(context, "tcp://127.0.0.1:1", ""), 0)
        app, declared = make_app(service), routes(service)
    registered = {(each.method, each.resource.canonical) for each in app.router.routes() if each.resource}
    assert registered - {("HEAD", path) for _, path in registered} == {
        (each.method, each.template) for each in declared
    }
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(each.method, each.template) for each in declared}


def test_fields_say_what_they_may_hold_and_mean(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["properties"]["top_k"] == {
        "anyOf": [{"type": "integer", "minimum": -1, "maximum": 2147483647}, {"type": "null"}],
        "description": "Sample from the k likeliest tokens; 0 or -1: from all.",
    }
    assert chat["properties"]["audio"] == {"type": "null", "description": "Not supported."}
    assert chat["required"] == ["messages"] and chat["additionalProperties"] is False
    whole, part = schemas["CompletionChoice"], schemas["CompletionPart"]
    assert "finish_reason" in whole["required"] and "token_ids" not in whole["required"]
    assert {"type": "null"} in part["properties"]["finish_reason"]["anyOf"]
    assert set(schemas["Batch"]["required"]) == set(schemas["Batch"]["properties"]), "an answer has all of them"


def test_every_field_that_is_described_is_known(http: httpx.Client, document: dict[str, Any]) -> None:
    """The handler reads what the route declares: what is wrong is the value, never the name."""
    seen = 0
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body is None or path == "/v1/batches":  # There are none without data_dir.
            continue
        for name in document["components"]["schemas"][body["schema"]["$ref"].split("/")[-1]]["properties"]:
            error = http.post(path, json=body["example"] | {name: [{"strange": [[]]}]}).json()["error"]
            assert error["code"] != "unknown_parameter" or error["param"] != name, (path, name)
            seen += 1
    assert seen > 60


@pytest.mark.parametrize(("path", "prompt", "whole", "chunk"), FORMS)
@pytest.mark.parametrize("fields", EVERYTHING)
def test_answers_are_as_they_are_described(
    http: httpx.Client,
    peer: EnginePeer,
    path: str,
    prompt: dict[str, Any],
    whole: type[msgspec.Struct],
    chunk: type[msgspec.Struct],
    fields: dict[str, Any],
) -> None:
    if "chat" in path and "logprobs" in fields:
        fields = fields | {"logprobs": True, "top_logprobs": fields["logprobs"]}
    answers_to(http, path, fields | prompt, whole, chunk)


def answers_to(
    http: httpx.Client, path: str, body: dict[str, Any], whole: type[msgspec.Struct], chunk: type[msgspec.Struct]
) -> None:
    """Ask for a whole answer and for a stream: each has what its struct has, no field more and none less."""
    options = body.pop("stream_options", None)
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    msgspec.json.decode(answer.content, type=whole)
    answer = http.post(path, json=body | {"stream": True, "stream_options": options})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 2 and events.pop() == "[DONE]"
    for each in events:
        msgspec.json.decode(each, type=chunk)


def test_answers_of_models_that_think(open_server: FrontendProcess, peer: EnginePeer) -> None:
    peer.token_of = script(ids_of("<think>\nOne?\n</think>\n\nTwo.\n"))
    with httpx.Client(base_url=open_server.url) as http:
        answers_to(
            http,
            "/v1/chat/completions",
            {"messages": CHAT, "chat_template": TEMPLATE, "max_tokens": 40},
            ChatCompletion,
            ChatCompletionChunk,
        )


def test_errors_are_as_they_are_described(http: httpx.Client) -> None:
    for answer in (
        http.post("/v1/completions", json={}),
        http.get("/v1/none"),
        http.get("/v1/files"),
        http.put("/docs"),
    ):
        assert msgspec.json.decode(answer.content, type=Error).error.message
    assert json.loads(http.post("/v1/completions", json={}).content)["error"]["param"] == "prompt"


def test_examples_are_answered(http: httpx.Client, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content and path != "/v1/batches":
            answer = http.post(path, json=content["application/json"]["example"])
            assert answer.status_code == 200, (path, answer.text)


def test_the_page_needs_nobody_else(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8" and 'fetch("openapi.json")' in answer.text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert not [each for each in ("src=", "http:", "https:", "@import", "<link") if each in answer.text]
