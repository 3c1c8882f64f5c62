"""A frontend process from its start to its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.engine_peer import CARD, EnginePeer
from tests.support.frontend_process import ROOT, FrontendProcess
from toka.messages import Submit

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}


def test_health_asks_the_manager(http: httpx.Client, peer: EnginePeer) -> None:
    answer = http.get("/health")
    assert answer.status_code == 200 and answer.json()["replicas"] == 1 and answer.json()["pages"] == 375
    peer.paused = True
    began = time.monotonic()
    answer = http.get("/health")
    assert answer.status_code == 503 and "no replica answered" in answer.json()["reason"]
    assert time.monotonic() - began < 3
    assert http.get("/ready").status_code == 200, "asks nobody"


def test_without_a_replica_requests_wait(http: httpx.Client, peer: EnginePeer, frontend: FrontendProcess) -> None:
    """The last known card is enough to check them."""
    peer.replicas, peer.paused = 0, True
    deadline = time.monotonic() + 5
    while http.get("/ready").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert http.get("/health").json()["reason"] == "no replica is ready"
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{frontend.url}/v1/completions", json=BODY)))
    thread.start()
    peer.wait_for(Submit)
    peer.replicas, peer.paused = 1, False
    thread.join(20)
    assert answers[0].status_code == 200
    frontend.wait_until_serving()


def test_a_broker_that_hangs_shows(peer: EnginePeer, http: httpx.Client, frontend: FrontendProcess) -> None:
    peer.deaf = True
    time.sleep(2.3)
    assert http.get("/health").json()["reason"] == "the broker does not answer"
    peer.deaf = False
    frontend.wait_until_serving()


def test_up_before_its_broker() -> None:
    """HTTP answers 503 until there is a model card; then it serves."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with FrontendProcess(f"tcp://127.0.0.1:{port}") as frontend:
        for path in ("/health", "/ready"):
            assert httpx.get(frontend.url + path).json()["reason"] == "the broker does not answer"
        response = httpx.post(f"{frontend.url}/v1/completions", json=BODY)
        assert response.status_code == 503 and int(response.headers["Retry-After"]) > 0
        assert httpx.get(f"{frontend.url}/v1/models").json()["data"][0]["id"] == CARD.name
        with EnginePeer(port=port):
            frontend.wait_until_serving()
            assert httpx.post(f"{frontend.url}/v1/completions", json=BODY).status_code == 200


def test_sigterm_lets_requests_finish() -> None:
    with EnginePeer(step_seconds=0.01) as peer, FrontendProcess(peer.endpoint) as frontend:
        frontend.wait_until_serving()
        answers: list[httpx.Response] = []

        def ask(stream: bool) -> None:
            answers.append(httpx.post(f"{frontend.url}/v1/completions", json=BODY | {"stream": stream}, timeout=30))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        peer.wait_for(Submit, 2)
        with httpx.Client(base_url=frontend.url) as client:
            assert client.get("/ready").status_code == 200
            frontend.terminate()
            while client.get("/ready").status_code == 200:
                time.sleep(0.01)
            refused = client.post("/v1/completions", json=BODY)
        assert (
            refused.status_code == 503 and refused.headers["Retry-After"] and refused.headers["Connection"] == "close"
        )
        for thread in threads:
            thread.join(20)
        assert sorted(answer.status_code for answer in answers) == [200, 200]
        assert any(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        assert frontend.process.wait(5) == 0


def test_sigterm_ends_what_takes_too_long() -> None:
    with EnginePeer() as peer, FrontendProcess(peer.endpoint, "shutdown_timeout=0.3") as frontend:
        peer.paused = True
        frontend.wait_until_serving()
        with httpx.stream("POST", f"{frontend.url}/v1/completions", json=BODY | {"stream": True}) as response:
            peer.wait_for(Submit)
            began = time.monotonic()
            frontend.terminate()
            text = "".join(response.iter_text())
        assert '"error"' in text and "shutting down" in text
        assert frontend.process.wait(5) == 0 and time.monotonic() - began < 3


def test_a_slow_reader_does_not_keep_it_from_ending() -> None:
    with EnginePeer(chunk=100) as peer, FrontendProcess(peer.endpoint, "shutdown_timeout=0.2") as frontend:
        frontend.wait_until_serving()
        address = urlsplit(frontend.url)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((address.hostname, address.port))
            data = b'{"prompt":"x","n":64,"max_tokens":5000,"stream":true,"ignore_eos":true}'
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            peer.wait_for(Submit)
            time.sleep(0.3)
            frontend.terminate()
            assert frontend.process.wait(8) == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["model=/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["broker="], "broker"),
        (["broker=udp://x"], "udp://x"),
        (["host=192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_a_start_that_fails_says_why(settings: list[str], why: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "frontend", f"broker=ipc://{tmp_path}/b", "port=0", *settings]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=20, text=True
    )
    assert done.returncode == 1 and why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken(frontend: FrontendProcess, tmp_path: Path) -> None:
    port = urlsplit(frontend.url).port
    command = [sys.executable, "-P", "-m", "frontend", f"broker=ipc://{tmp_path}/b", f"port={port}"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=20, text=True)
    assert done.returncode == 1 and f":{port}: address already in use" in done.stderr.lower()


def test_small_and_silent(frontend: FrontendProcess, http: httpx.Client) -> None:
    before = len(frontend.lines)
    http.post("/v1/completions", json=BODY)
    assert len(frontend.lines) == before, "no line for a request"
    process = psutil.Process(frontend.process.pid)
    assert process.memory_info().rss < 120 << 20
    mapped = {Path(each.path).name for each in process.memory_maps()}
    assert not any("torch" in name or "transformers" in name for name in mapped)
