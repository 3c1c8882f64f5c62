"""`POST /v1/abort`: requests end with what they have."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

from tests.frontend.test_answers import text_of
from tests.frontend.test_bad_requests import said
from tests.frontend.test_streams import BODY, waiting
from tests.support.demo import peer_text
from tests.support.engine_peer import EnginePeer
from tests.support.frontend_process import FrontendProcess
from toka.messages import Cancel, Release, Submit

NAMED: dict[str, Any] = BODY | {"stream": False, "request_id": "mine", "seed": 3}


def abort(http: httpx.Client, body: dict[str, Any]) -> None:
    """As soon as there is something to abort."""
    end = time.monotonic() + 10
    while (answer := http.post("/v1/abort", json=body)).json().get("aborted") != 1:
        assert time.monotonic() < end, answer.text
        time.sleep(0.01)


def events_of(lines: Iterable[str]) -> Iterator[Any]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: {"))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream(http: httpx.Client, peer: EnginePeer, route: str) -> None:
    peer.step_seconds = 0.01
    body = BODY | {"n": 2, "seed": 3, "stream_options": {"include_usage": True}}
    if "chat" in route:
        body = {key: value for key, value in body.items() if key != "prompt"}
        body |= {"messages": [{"role": "user", "content": "x"}]}
    with http.stream("POST", route, json=body) as response:
        lines = response.iter_lines()
        (first,) = events_of([next(lines)])
        abort(http, {"request_id": first["id"]})
        chunks = [first, *events_of(lines)]
    *parts, usage = chunks
    reasons = [choice["finish_reason"] for chunk in parts for choice in chunk["choices"]]
    assert reasons.count("abort") == 2 and set(reasons) == {None, "abort"}
    count = usage["usage"]["completion_tokens"]
    assert count < 1000 and text_of(parts, 1).startswith(peer_text(3, 1, 1))
    cancels = peer.wait_for(Cancel)
    assert len(cancels) == len(peer.wait_for(Release)) == 1 and cancels[0].samples == []


def test_a_whole_answer_by_the_client_s_name(frontend: FrontendProcess, http: httpx.Client, peer: EnginePeer) -> None:
    peer.step_seconds = 0.01
    with waiting(frontend, NAMED) as answers:
        peer.wait_for(Submit)
        abort(http, {"request_id": "mine"})
    answer = answers[0].json()
    (choice,) = answer["choices"]
    assert (answer["id"], choice["finish_reason"]) == ("mine", "abort")
    assert choice["text"] == peer_text(3, 0, answer["usage"]["completion_tokens"])
    assert len(peer.wait_for(Release)) == 1


@pytest.mark.parametrize("state", ["paused", "deaf"])
def test_one_that_waits(frontend: FrontendProcess, http: httpx.Client, peer: EnginePeer, state: str) -> None:
    """In a queue, or for the broker to take it."""
    setattr(peer, state, True)
    with waiting(frontend, NAMED) as answers:
        abort(http, {"all": True})
    (choice,) = answers[0].json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")


def test_samples_that_ended_stay_as_they_are(http: httpx.Client, peer: EnginePeer) -> None:
    peer.step_seconds = 0.005
    peer.token_of = lambda seed, sample, position: 2 if sample == 0 and position == 3 else 1000 + position
    body = BODY | {"n": 2, "ignore_eos": False}
    with http.stream("POST", "/v1/completions", json=body) as response:
        reasons: dict[int, str] = {}
        for chunk in events_of(response.iter_lines()):
            (choice,) = chunk["choices"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
            if choice["finish_reason"] == "stop":
                abort(http, {"request_id": chunk["id"]})
    assert reasons == {0: "stop", 1: "abort"}


def test_what_cannot_be_aborted(http: httpx.Client) -> None:
    assert http.post("/v1/abort", json={"all": True}).json() == {"aborted": 0}
    said(http.post("/v1/abort", json={"request_id": "nobody's"}), 404, "request_id")
    for body in ({}, {"all": False}, {"all": True, "request_id": "x"}, {"request_id": None}):
        said(http.post("/v1/abort", json=body), 400, "request_id")
    said(http.post("/v1/abort", json={"request_id": 5}), 400, "request_id")
    said(http.post("/v1/abort", json={"al": True}), 400, "al")
    said(http.post("/v1/abort", content=b"{"), 400, None)
