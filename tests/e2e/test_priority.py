"""Priorities through HTTP, where the less urgent hold all slots and most of the KV cache."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.batches import jsonl, line
from tests.support.server import Server, until

LOW = 4
"""As many as there are slots."""
TOKENS = 112
SEED = 5


def test_the_urgent_overtake_what_runs_and_what_waits(small: Server) -> None:
    """Four slots and 512 tokens of KV cache: all taken by the first four of seven requests of some 120 tokens."""
    ended: list[tuple[float, str]] = []
    begun = threading.Semaphore(0)

    def ask(name: str, priority: int, tokens: int) -> str:
        body = {"prompt": f"{name} says", "max_tokens": tokens, "priority": priority, "seed": SEED, "ignore_eos": True}
        text = ""
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            for each in response.iter_lines():
                if each.startswith("data: {"):
                    (choice,) = json.loads(each[6:])["choices"]
                    if not text and choice["text"]:
                        begun.release()
                    text += choice["text"]
        ended.append((time.monotonic(), name))
        return text

    with httpx.Client(base_url=small.url, timeout=60) as http, ThreadPoolExecutor(2 * LOW) as pool:
        low = [pool.submit(ask, f"low {number}", 3, TOKENS) for number in range(LOW)]
        waiting = [pool.submit(ask, f"waiting {number}", 3, TOKENS) for number in range(3)]
        for _ in range(LOW):
            assert begun.acquire(timeout=20)
        high = [pool.submit(ask, f"high {number}", -1, 8) for number in range(3)]
        texts = {name: each.result() for name, each in zip(names(), [*low, *waiting, *high])}
        order = [name for _, name in sorted(ended)]
        assert set(order[:3]) == {"high 0", "high 1", "high 2"}, order
        # Who gave way goes on where it was: float32 on a CPU draws the same tokens.
        for name in ("low 3", "low 0", "waiting 1"):
            assert ask(name, 0, TOKENS) == texts[name]


def names() -> list[str]:
    return [f"low {n}" for n in range(LOW)] + [f"waiting {n}" for n in range(3)] + [f"high {n}" for n in range(3)]


def test_a_batch_gives_way_to_requests(small: Server) -> None:
    with httpx.Client(base_url=f"{small.url}/v1", timeout=60) as http:
        lines: list[Any] = [line(f"r{n}", prompt=f"Number {n}", max_tokens=TOKENS) for n in range(40)]
        file = http.post("/files", files={"file": ("in.jsonl", jsonl(lines))}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        batch = http.post("/batches", json=asked).json()["id"]

        def counts() -> dict[str, int]:
            found: dict[str, int] = http.get(f"/batches/{batch}").json()["request_counts"]
            return found

        until(lambda: httpx.get(f"{small.url}/health").json()["running"] == 4, 20, "the batch runs")
        before = counts()["completed"]
        assert http.post("/completions", json={"prompt": "x", "max_tokens": 4}).status_code == 200
        assert counts()["completed"] - before < 4, "nor did it wait for the lines that ran"
        until(lambda: counts()["completed"] == 40, 60, "all lines are answered")
