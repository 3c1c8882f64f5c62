"""Streams as a connection sees them: silence, slow readers, clients that leave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.demo import ids_of
from tests.support.engine_peer import EnginePeer, script
from tests.support.frontend_process import FrontendProcess
from toka.messages import Cancel, Release, Submit

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 5000, "stream": True, "ignore_eos": True}


def connect(frontend: FrontendProcess, body: dict[str, Any], buffer: int = 0) -> socket.socket:
    """A connection on which the request was sent; `buffer`: bytes the kernel keeps for a reader that does not read."""
    address = urlsplit(frontend.url)
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(20)
    connection.connect((address.hostname, address.port))
    data = json.dumps(body).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return connection


@contextmanager
def waiting(frontend: FrontendProcess, body: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """A client in a thread, whose answer is in the list when the block has ended."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{frontend.url}/v1/completions", json=body, timeout=30))
    )
    thread.start()
    yield answers
    thread.join(30)


def test_a_stream_that_waits_has_its_headers_and_pings(frontend: FrontendProcess, peer: EnginePeer) -> None:
    peer.paused = True
    with httpx.stream("POST", f"{frontend.url}/v1/completions", json=BODY | {"max_tokens": 2}) as response:
        assert response.status_code == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = response.iter_lines()
        began = time.monotonic()
        assert [line for line in (next(lines) for _ in range(6)) if line] == [": ping"] * 3
        assert 0.5 < time.monotonic() - began < 2, "every 0.2 s"
        peer.paused = False
        rest = list(lines)
    assert rest[-2] == "data: [DONE]" and ": ping" not in rest


def test_no_ping_while_chunks_come(frontend: FrontendProcess, peer: EnginePeer) -> None:
    peer.step_seconds = 0.05
    text = httpx.post(f"{frontend.url}/v1/completions", json=BODY | {"max_tokens": 15}).text
    assert text.count("data: {") == 16 and ": ping" not in text


def test_a_character_is_not_sent_in_pieces(http: httpx.Client, peer: EnginePeer) -> None:
    peer.token_of, peer.step_seconds = script(ids_of("🦜世🇫🇷")), 0.005
    lines = http.post("/v1/completions", json=BODY | {"ignore_eos": False}).text.split("\n\n")
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    assert "".join(texts) == "🦜世🇫🇷" and "�" not in "".join(texts)


def test_a_slow_reader_slows_only_itself(frontend: FrontendProcess, peer: EnginePeer) -> None:
    """It reads nothing of 32 times 5,000 tokens: they merge and wait as ids, and another stream goes on."""
    peer.chunk = 20
    process = psutil.Process(frontend.process.pid)
    before = process.memory_info().rss
    slow = connect(frontend, BODY | {"n": 32}, buffer=4096)
    peer.wait_for(Submit)
    began = time.monotonic()
    quick = httpx.post(f"{frontend.url}/v1/completions", json=BODY | {"max_tokens": 200}, timeout=20)
    assert quick.text.count('"finish_reason":"length"') == 1
    assert time.monotonic() - began < 5
    peer.wait_for(Release, 2)  # The engine is done with the slow one as well.
    assert process.memory_info().rss - before < 40 << 20
    received = b""
    while b"[DONE]" not in received[-64:]:
        received += slow.recv(1 << 20)
    slow.close()
    assert received.count(b'"finish_reason":"length"') == 32
    assert received.count(b"data: {") < 32 * 5000 / 20, "chunks were merged"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("paused", [True, False])
def test_a_client_that_leaves_frees_its_sequences(
    frontend: FrontendProcess, peer: EnginePeer, stream: bool, paused: bool
) -> None:
    peer.step_seconds, peer.paused = 0.01, paused
    connection = connect(frontend, BODY | {"stream": stream, "n": 3})
    (submit,) = peer.wait_for(Submit)
    time.sleep(0.05)
    connection.close()
    (cancel,) = peer.wait_for(Cancel, seconds=3)
    (release,) = peer.wait_for(Release, seconds=3)
    assert (cancel.request, cancel.samples) == (submit.request, [])
    assert release.requests == [submit.request]


def test_a_slow_reader_that_leaves_frees_its_sequences(frontend: FrontendProcess, peer: EnginePeer) -> None:
    peer.chunk, peer.step_seconds = 50, 0.01
    connection = connect(frontend, BODY | {"n": 128}, buffer=4096)
    peer.wait_for(Submit, 2)
    time.sleep(0.5)
    connection.close()
    assert len(peer.wait_for(Cancel, seconds=5)) == 1


def test_a_full_queue_is_429_before_any_headers(http: httpx.Client, peer: EnginePeer) -> None:
    peer.refusal = (429, "the queue is full", 7)
    for stream in (True, False):
        response = http.post("/v1/completions", json=BODY | {"stream": stream})
        assert (response.status_code, response.headers["Retry-After"]) == (429, "7")
        assert response.json()["error"]["message"] == "the queue is full"
    peer.refusal = None
    assert http.post("/v1/completions", json=BODY | {"max_tokens": 1}).status_code == 200


def test_a_failure_in_mid_stream_is_an_event_and_the_end(frontend: FrontendProcess, peer: EnginePeer) -> None:
    peer.step_seconds = 0.02
    with httpx.stream("POST", f"{frontend.url}/v1/completions", json=BODY, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        peer.abort_all()
        rest = [line for line in lines if line]
    assert rest[-1].startswith('data: {"error":{') and "[DONE]" not in "".join(rest)
    peer.step_seconds = 0.5
    with waiting(frontend, BODY | {"stream": False}) as answers:
        peer.wait_for(Submit, 2)
        time.sleep(0.1)
        peer.abort_all()
    assert answers[0].status_code == 500 and answers[0].json()["error"]["type"] == "server_error"


def test_keep_alive_serves_one_request_after_another(frontend: FrontendProcess, peer: EnginePeer) -> None:
    with httpx.Client(base_url=frontend.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=BODY | {"max_tokens": 1}).text.endswith("data: [DONE]\n\n")
