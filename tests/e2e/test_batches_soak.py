"""`make soak`: a large batch while every kind of process, and the whole server, is killed under it."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SIZES
from tests.support import soak
from tests.support.batches import COMPLETIONS, jsonl, line
from tests.support.server import Server, serve, until

LINES, BAD, TOKENS = 5000, 50, 24
SETTINGS = SIZES | {"frontends": 2, "batch_items": 256, "restart_limit": 20}
PARTS = ("toka: frontend 0", "toka: frontend 1", "toka: broker", "toka: manager r0", "toka: stage r0.0")
SERVER = "the whole server"
SERVER_KILLS = 3
SEED = 20261201
ASKED_AGAIN = 40
"""Good lines whose answers are compared with those of requests outside a batch."""

Event = tuple[int, float, str]
"""After so many lines are over, and so many seconds more, this is killed."""


def make_lines(draw: random.Random) -> tuple[list[dict[str, Any] | str], dict[int, str]]:
    """All lines, and what is wrong with the bad ones."""
    kinds = itertools.cycle(("refused", "elsewhere", "broken"))
    bad = {number: next(kinds) for number in draw.sample(range(LINES), BAD)}
    lines: list[dict[str, Any] | str] = []
    for number in range(LINES):
        fields = line(f"r{number}", **asked_by(number))
        if bad.get(number) == "refused":
            fields["body"]["max_tokens"] = -1
        elif bad.get(number) == "elsewhere":
            fields["url"] = "/v1/chat/completions"
        lines.append("{" if bad.get(number) == "broken" else fields)
    return lines, bad


def asked_by(number: int) -> dict[str, Any]:
    begin = "One" if number % 3 else "Another"
    return {"prompt": f"{begin} tale, of number {number}", "max_tokens": TOKENS, "temperature": 0}


def make_events(draw: random.Random) -> list[Event]:
    """Each part is killed once, the server three times, in any order."""
    victims = [*PARTS, *[SERVER] * SERVER_KILLS]
    draw.shuffle(victims)
    moments = sorted(draw.sample(range(LINES // 100, LINES * 9 // 10), len(victims)))
    return [(moment, draw.random(), victim) for moment, victim in zip(moments, victims)]


def get(server: Server, path: str) -> httpx.Response:
    """What is answered, asked again while the process that would is down."""
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{server.url}/v1/{path}", timeout=30)
            if answer.status_code == 200:
                return answer
        assert time.monotonic() < end, server.output
        time.sleep(0.05)


def state(server: Server, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = get(server, f"batches/{batch}").json()
    return found


def create(server: Server, lines: list[dict[str, Any] | str]) -> str:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http:
        files = {"file": ("in.jsonl", jsonl(lines))}
        file = http.post("/files", files=files, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        return str(http.post("/batches", json=asked).json()["id"])


def kill_what_is_due(server: Server, batch: str, due: Iterator[Event]) -> bool:
    """Until that is the server; False where nothing is due any more."""
    for moment, pause, victim in due:

        def reached(moment: int = moment) -> bool:
            counts = state(server, batch)["request_counts"]
            return bool(counts["completed"] + counts["failed"] >= moment)

        until(reached, 120, f"{moment} lines are over")
        time.sleep(pause)
        if victim == SERVER:
            server.kill()
            return True
        server.part(victim).kill()
    return False


@pytest.mark.soak
@pytest.mark.skipif(not soak.RECORD, reason="`make soak` runs it")
def test_a_large_batch_survives_every_kill(folder: Path, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    lines, bad = make_lines(draw)
    due, batch, killed = iter(make_events(draw)), "", True
    while killed:
        with serve(model=folder, data_dir=tmp_path, **SETTINGS) as server:
            batch = batch or create(server, lines)
            killed = kill_what_is_due(server, batch, due)
            if not killed:
                check(server, batch, bad)


def check(server: Server, batch: str, bad: dict[int, str]) -> None:
    """Each good line is once in the output, and each bad one once in the error file."""
    until(lambda: state(server, batch)["status"] not in ("in_progress", "finalizing"), 240, "the batch is over")
    end = state(server, batch)
    assert end["status"] == "completed", end
    assert end["request_counts"] == {"total": LINES, "completed": LINES - BAD, "failed": BAD}
    output, errors = (lines_of(server, end[name]) for name in ("output_file_id", "error_file_id"))
    answered = Counter(each["custom_id"] for each in output)
    assert answered == Counter(f"r{number}" for number in range(LINES) if number not in bad)
    wrong = Counter(each["custom_id"] for each in errors)
    assert wrong == Counter(None if kind == "broken" else f"r{number}" for number, kind in bad.items())
    assert end["usage"]["output_tokens"] == TOKENS * (LINES - BAD)
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http:
        for each in output[:: len(output) // ASKED_AGAIN]:
            body = line("", **asked_by(int(each["custom_id"][1:])))["body"]
            again = http.post("/completions", json=body).json()
            assert each["response"]["body"]["choices"][0]["text"] == again["choices"][0]["text"]


def lines_of(server: Server, file: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in get(server, f"files/{file}/content").text.splitlines()]
