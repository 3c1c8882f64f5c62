"""Parts started by themselves, over tcp with keys: on one host, and on two."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import SIZES
from tests.support.grammar_client import check, grammar_client
from tests.support.namespaces import two_hosts
from tests.support.server import Running, free_port, running, until
from toka.keygen import add_client, make_keys

PORT = 7000
IDS = [40, 71, 68, 111, 222, 333, 17, 99]


@pytest.fixture
def private() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.fixture
def keys(private: Path) -> Path:
    make_keys(private / "keys")
    return private / "keys"


def serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def complete(frontend: Running) -> str:
    """A greedy completion, once a replica is there."""
    url = frontend.wait_for(r"ready at=(http\S+)")[1]
    until(lambda: serves(url), 60, f"/health is 200:\n{frontend.output}")
    return ask(url)


def ask(url: str) -> str:
    body = {"prompt": IDS, "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_parts_started_by_hand_serve_with_keys(folder: Path, private: Path, keys: Path, greedy):
    port = free_port()
    worker = running(
        "workers", broker=f"tcp://localhost:{port}", keys=keys, model=folder, run_dir=private / "w", **SIZES
    )
    frontend = running("frontend", broker=f"tcp://127.0.0.1:{port}", keys=keys, model=folder, port=0)
    with worker as w, frontend as f, running("broker", broker=f"tcp://127.0.0.1:{port}", keys=keys) as b:
        assert complete(f) == greedy(IDS, 12)
        for part in (f, w, b):
            assert part.stop() == 0, part.output
            assert not part.left()
            assert "refused" not in part.output and "failed" not in part.output


def test_a_worker_on_another_host_serves(folder: Path, private: Path, keys: Path, greedy):
    """Each host has its own files: the broker's all of them, the worker's what was made for it."""
    add_client(keys, "worker")
    shutil.copytree(keys / "worker", private / "copied")
    with two_hosts() as (first, second), ExitStack() as parts:
        with first.entered():
            broker = parts.enter_context(running("broker", broker=f"tcp://*:{PORT}", keys=keys))
            frontend = parts.enter_context(
                running("frontend", broker=f"tcp://127.0.0.1:{PORT}", keys=keys, model=folder, port=0)
            )
        with second.entered():
            worker = parts.enter_context(
                running(
                    "workers", broker=f"tcp://{first.ipv4}:{PORT}", keys=private / "copied", model=folder,
                    run_dir=private / "w", **SIZES,
                )
            )  # fmt: skip
        with first.entered():
            assert complete(frontend) == greedy(IDS, 12)
        for part in (frontend, worker, broker):
            assert part.stop() == 0, part.output


def test_the_launcher_serves_over_tcp_with_keys(folder: Path, keys: Path, greedy):
    with running("toka", broker=f"tcp://127.0.0.1:{free_port()}", keys=keys, model=folder, port=0, **SIZES) as toka:
        url = toka.wait_for(r"curl .*(http://[^/]+:\d+)/v1")[1]
        assert ask(url) == greedy(IDS, 12)
        assert toka.stop() == 0, toka.output


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_stages_of_a_replica_on_two_hosts(folder: Path, private: Path, keys: Path, greedy, tp_size: int):
    """A pipeline whose second stage, or both its ranks, is on another host; whichever is started first."""
    sizes = {"pp_size": 2, "tp_size": tp_size, "nodes": 2, "keys": keys, "model": folder, **SIZES}
    with two_hosts() as (here, there), ExitStack() as started:
        broker, rendezvous = f"tcp://{here.ipv4}:{PORT}", f"tcp://{here.ipv4}:{PORT + 100}"
        where = {"broker": broker, "rendezvous": rendezvous, "replica": "r0"}
        with there.entered():
            far = started.enter_context(running("workers", node_rank=1, run_dir=private / "b", **where, **sizes))
        with here.entered():
            started.enter_context(running("broker", broker=broker, keys=keys, run_dir=private / "br"))
            started.enter_context(running("workers", node_rank=0, run_dir=private / "a", **where, **sizes))
            front = started.enter_context(
                running("frontend", broker=broker, keys=keys, model=folder, port=0, run_dir=private / "f")
            )
            assert complete(front) == greedy(IDS, 12)
            # The matcher is here, and whoever waits for its masks there.
            asyncio.run(check_grammars(broker, folder, keys))
            # The replica starts over as a whole when one host's share of it has died.
            far.part(f"toka: stage r0.{tp_size}").kill()
            url = front.wait_for(r"ready at=(http\S+)")[1]
            until(lambda: not serves(url), 30, "the replica's end is noticed")
            until(lambda: serves(url), 90, f"the replica is back:\n{far.output}")
            assert ask(url) == greedy(IDS, 12)


async def check_grammars(broker: str, folder: Path, keys: Path) -> None:
    async with grammar_client(broker, str(folder), str(keys)) as client:
        await asyncio.wait_for(check(client, times=1), 60)


def test_hosts_that_do_not_agree_end_the_start(folder: Path, private: Path, keys: Path):
    port = free_port()
    sizes = {"pp_size": 2, "nodes": 2, "keys": keys, "model": folder, **SIZES}
    where = {"broker": f"tcp://127.0.0.1:{port}", "rendezvous": f"tcp://127.0.0.1:{port + 10}", "restart_limit": 0}
    first = running("workers", node_rank=0, run_dir=private / "a", **where, **sizes)
    second = running("workers", node_rank=1, run_dir=private / "b", page_size=8, **where, **sizes)
    with first as one, second as other:
        for worker in (one, other):
            assert worker.wait(60) == 1
            assert "stage 1: its worker has page_size='8', not '16', as node_rank=0 has" in worker.output
