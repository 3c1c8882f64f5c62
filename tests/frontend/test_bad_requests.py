"""Each wrong request gets an error in OpenAI's shape that names the field, and the server goes on."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import openai
import pytest

from tests.frontend.conftest import MAX_BODY
from tests.support.engine_peer import EnginePeer
from toka.messages import Submit

COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
DEEP = "[" * 100_000


def said(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return error  # type: ignore[no-any-return]


BOTH: list[tuple[str, Any, str]] = [
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", 5.0, "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("n", 0, "n"),
    ("n", -1, "n"),
    ("n", 129, "n"),
    ("n", 1.5, "n"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 0.5, "top_k"),
    ("min_p", -0.1, "min_p"),
    ("min_p", 1.1, "min_p"),
    ("presence_penalty", 2.1, "presence_penalty"),
    ("frequency_penalty", -2.1, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("logit_bias", {"49152": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias[...]"),
    ("logit_bias", [1], "logit_bias"),
    ("seed", 1 << 63, "seed"),
    ("seed", 0.5, "seed"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", ["a" * 1025], "stop[0]"),
    ("stop", 5, "stop"),
    ("stop_token_ids", [49_152], "stop_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", "2", "stop_token_ids"),
    ("min_tokens", 3, "min_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("stream", "yes", "stream"),
    ("stream", 1, "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", {"nonsense": True}, "stream_options.nonsense"),
    ("ignore_eos", "no", "ignore_eos"),
    ("priority", 1 << 40, "priority"),
    ("return_token_ids", 1, "return_token_ids"),
    ("request_id", "", "request_id"),
    ("request_id", 5, "request_id"),
    ("user", 5, "user"),
    ("metadata", {"a": 5}, "metadata[...]"),
    ("metadata", "a", "metadata"),
    ("store", "yes", "store"),
    ("service_tier", 5, "service_tier"),
    ("safety_identifier", True, "safety_identifier"),
    ("prompt_cache_key", [], "prompt_cache_key"),
    ("model", 5, "model"),
    ("nonsense", 1, "nonsense"),
    ("nonsense", None, "nonsense"),
    ("guided_json", {}, "guided_json"),
]
COMPLETIONS: list[tuple[str, Any, str]] = [
    ("prompt", None, "prompt"),
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", [""], "prompt"),
    ("prompt", ["a", ""], "prompt"),
    ("prompt", [[]], "prompt"),
    ("prompt", [[1], []], "prompt"),
    ("prompt", 5, "prompt"),
    ("prompt", {"text": "a"}, "prompt"),
    ("prompt", [1, "a"], "prompt"),
    ("prompt", [[1], "a"], "prompt"),
    ("prompt", [1, [1]], "prompt"),
    ("prompt", [1.0], "prompt[0]"),
    ("prompt", [True], "prompt[0]"),
    ("prompt", [-1], "prompt"),
    ("prompt", [49_152], "prompt"),
    ("prompt", [1 << 40], "prompt"),
    ("prompt", [[1], [1, -5]], "prompt"),
    ("prompt", ["a"] * 257, "prompt"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", -1, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("suffix", "end", "suffix"),
    ("best_of", 2, "best_of"),
    ("echo", "yes", "echo"),
    ("tools", [], "tools"),
    ("messages", [], "messages"),
]
CHATS: list[tuple[str, Any, str]] = [
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", "Hello", "messages"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [{"content": "Hello"}], "messages[0].role"),
    ("messages", [{"role": "king", "content": "Hello"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": "a", "mood": "b"}], "messages[0].mood"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content[0].type",
    ),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}],
        "messages[0].content[0].mood",
    ),
    ("messages", [{"role": "system"}], "messages[0].content"),
    ("messages", [{"role": "tool", "tool_call_id": "1"}], "messages[0].content"),
    ("continue_final_message", True, "continue_final_message"),
    ("continue_final_message", 1, "continue_final_message"),
    ("chat_template", "{{ messages }}", "chat_template"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
    ("chat_template_kwargs", [], "chat_template_kwargs"),
    (
        "messages",
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}],
        "messages[1].tool_calls[0].type",
    ),
    ("max_completion_tokens", 3, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("logprobs", 2, "logprobs"),
    ("top_logprobs", 2, "top_logprobs"),
    ("modalities", ["text", "audio"], "modalities"),
    ("prompt", "Hello", "prompt"),
    *[
        (field, value, field)
        for field, value in {
            "functions": [],
            "function_call": "none",
            "audio": {"voice": "alloy", "format": "wav"},
            "prediction": {"type": "content", "content": "a"},
            "reasoning_effort": "low",
            "verbosity": "low",
            "web_search_options": {},
            "moderation": {},
            "prompt_cache_retention": "24h",
        }.items()
    ],
]


@pytest.mark.parametrize(("field", "value", "param"), BOTH + COMPLETIONS)
def test_completions_name_the_field(http: httpx.Client, field: str, value: Any, param: str) -> None:
    said(http.post("/v1/completions", json=COMPLETION | {field: value}), 400, param)


@pytest.mark.parametrize(("field", "value", "param"), BOTH + CHATS)
def test_chats_name_the_field(http: httpx.Client, field: str, value: Any, param: str) -> None:
    said(http.post("/v1/chat/completions", json=CHAT | {field: value}), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'{"prompt": "a"} x', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "a\x00b"}', None),
        (b'\xef\xbb\xbf{"prompt": "a"}', None),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": -Infinity}', "temperature"),
        (b'{"prompt": "a", "logit_bias": {"5": NaN}}', "logit_bias.5"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (rb'{"prompt": "a\ud800b"}', "prompt"),
        (rb'{"prompt": ["ok", "\udc00"]}', "prompt[1]"),
        (rb'{"prompt": "a", "\ud800": 1}', "body"),
        (b'{"prompt": ' + DEEP.encode(), "prompt[0][0]"),
        (b'{"metadata": {"a": ' + DEEP.encode() + b"}}", "metadata[...]"),
    ],
)
def test_what_json_cannot_hold(http: httpx.Client, body: bytes, param: str | None) -> None:
    said(http.post("/v1/completions", content=body), 400, param)


def test_a_chat_nested_too_deeply(http: httpx.Client) -> None:
    for deep in (DEEP, '{"a":' * 100_000):
        body = '{"chat_template_kwargs": {"a": ' + deep + "}}"
        said(http.post("/v1/chat/completions", content=body), 400, None)


def test_an_unknown_model_is_404_and_the_known_names_are_not(http: httpx.Client) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = said(http.post(path, json=body | {"model": "gpt-5"}), 404, "model")
        assert error["code"] == "model_not_found"
        for name in ("default", "SmolLM2-135M-Instruct", None):
            assert http.post(path, json=body | {"model": name}).status_code == 200
    said(http.get("/v1/models/gpt-5"), 404, "model")
    assert http.get("/v1/models/SmolLM2-135M-Instruct").json()["id"] == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("body", "param", "numbers"),
    [
        ({"prompt": [5] * 9000}, "prompt", ("9000", "8192")),
        ({"prompt": [5] * 8192}, "prompt", ("8192", "8192")),
        ({"prompt": [5] * 8000, "max_tokens": 193}, "prompt", ("8000", "6000")),
        ({"prompt": "word " * 9000}, "prompt", ("9001", "8192")),
        ({"prompt": "x" * (81 * 8193)}, "prompt", ("8193", "8192")),
        ({"prompt": [5] * 6000}, "prompt", ("6000", "6000")),
        ({"prompt": [5] * 1000, "max_tokens": 7193}, "max_tokens", ("7193", "8192")),
        ({"prompt": [5] * 5999, "max_tokens": 2}, "max_tokens", ("5999", "6000")),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(
    http: httpx.Client, body: dict[str, Any], param: str, numbers: tuple[str, str]
) -> None:
    error = said(http.post("/v1/completions", json=body), 400, param)
    assert all(number in error["message"] for number in numbers), error
    assert error["code"] == ("context_length_exceeded" if "8192" in numbers else "invalid_value")


def test_a_chat_that_does_not_fit_names_its_messages(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "word " * 9000}]
    error = said(http.post("/v1/chat/completions", json={"messages": messages}), 400, "messages")
    assert error["code"] == "context_length_exceeded"


def test_the_last_token_that_fits_may_be_asked_for(http: httpx.Client, peer: EnginePeer) -> None:
    assert http.post("/v1/completions", json={"prompt": [5] * 5999, "max_tokens": 1}).status_code == 200
    assert http.post("/v1/completions", json={"prompt": [5] * 5995}).json()["usage"]["completion_tokens"] == 5


def test_a_body_over_the_limit_is_413(http: httpx.Client) -> None:
    said(http.post("/v1/completions", content=b" " * (MAX_BODY + 1)), 413, None)
    said(http.post("/v1/completions", content=iter([b" " * (MAX_BODY // 2)] * 3)), 413, None)
    bomb = gzip.compress(b" " * (MAX_BODY * 8))
    said(http.post("/v1/completions", content=bomb, headers={"Content-Encoding": "gzip"}), 413, None)
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_encoded_as_it_says_is_400(http: httpx.Client, encoding: str) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Encoding": encoding})
    assert encoding in said(answer, 400, None)["message"]


def test_a_large_body_is_fine(http: httpx.Client) -> None:
    prompt = [[5] * 5000] * 100
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    assert 1 << 20 < len(body) < MAX_BODY
    answer = http.post("/v1/completions", content=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(100))
    assert answer["usage"]["prompt_tokens"] == 500_000


def test_routes_that_are_not_there(http: httpx.Client) -> None:
    said(http.get("/v1/nothing"), 404, None)
    response = http.get("/v1/completions")
    said(response, 405, None)
    assert response.headers["Allow"] == "POST"


def test_what_is_accepted_without_effect(http: httpx.Client) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    absent = dict.fromkeys(["temperature", "stop", "logprobs", "stream", "n", "seed"])
    assert http.post("/v1/completions", json=COMPLETION | fields | absent).status_code == 200
    more = {"tools": None, "response_format": {"type": "text"}, "modalities": ["text"], "audio": None}
    assert http.post("/v1/chat/completions", json=CHAT | fields | absent | more).status_code == 200
    headers = {"Content-Type": "text/plain", "Authorization": "Bearer anything"}
    assert http.post("/v1/completions", content=json.dumps(COMPLETION), headers=headers).status_code == 200


def test_what_is_refused_says_why(http: httpx.Client) -> None:
    for field, value, why in (
        ("best_of", 2, "all samples that are drawn are returned"),
        ("suffix", "end", "behind a prompt"),
    ):
        answer = http.post("/v1/completions", json=COMPLETION | {"echo": True, field: value})
        error = said(answer, 400, field)
        assert why in error["message"] and error["code"] == "unsupported_parameter"
    assert http.post("/v1/completions", json=COMPLETION | {"n": 2, "best_of": 2}).status_code == 200


def test_nothing_wrong_reaches_the_engine(http: httpx.Client, peer: EnginePeer) -> None:
    http.post("/v1/completions", json=COMPLETION | {"nonsense": 1})
    http.post("/v1/completions", json=COMPLETION | {"prompt": ["fine", ""]})
    http.post("/v1/completions", json=COMPLETION)
    assert len(peer.of(Submit)) == 1


def test_the_sdk_raises_its_own_error(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="default", messages=[])
    assert caught.value.param == "messages"
