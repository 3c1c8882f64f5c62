"""Requests to a server that is full, that breaks connections, and that is not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from toka import client as module
from toka.client import Answer, Client

Reply = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def serving(path: Path, *replies: Reply) -> AsyncIterator[list[bytes]]:
    """A server that gives one reply after the other, and the last one for ever; what it has been sent."""
    seen: list[bytes] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(await request.read())
        return replies[min(len(seen), len(replies)) - 1](request)

    app = web.Application()
    app.router.add_post("/{any:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield seen
    finally:
        await runner.cleanup()


def busy(status: int, after: str | None) -> Reply:
    return lambda request: web.Response(status=status, headers={"Retry-After": after} if after else {})


def broken(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def good(request: web.Request) -> web.StreamResponse:
    return web.Response(body=request.path.encode())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.01)


async def test_it_waits_as_long_as_it_is_told_and_is_answered_once(tmp_path: Path):
    replies = [busy(429, "0.2"), broken, busy(503, None), busy(429, "Wed, 21 Oct 2015 07:28:00 GMT"), broken, good]
    async with serving(tmp_path / "s", *replies) as seen, Client([f"unix:{tmp_path}/s"]) as client:
        began = time.monotonic()
        assert await client.post("/v1/x", b"{}") == Answer(200, b"/v1/x")
        assert time.monotonic() - began >= 0.2
    assert seen == [b"{}"] * 6


async def test_errors_are_answers(tmp_path: Path):
    async with serving(tmp_path / "s", busy(400, None)), Client([f"unix:{tmp_path}/s"]) as client:
        assert (await client.post("/v1/x", b"{}")).status == 400


@pytest.mark.parametrize("there", [True, False])
async def test_it_gives_up_where_no_connection_holds(tmp_path: Path, there: bool):
    async with serving(tmp_path / "s", broken) as seen, Client([f"unix:{tmp_path}/{'s' if there else 'no'}"]) as client:
        with pytest.raises(ConnectionError, match="the server cannot be reached: "):
            await client.post("/v1/x", b"{}")
    assert len(seen) == (module.MOST_LOST if there else 0)


async def test_requests_go_to_the_server_with_the_fewest(tmp_path: Path):
    async with (
        serving(tmp_path / "a", good) as one,
        serving(tmp_path / "b", good) as two,
        Client([f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"], api_key="k") as client,
    ):
        await asyncio.gather(*(client.post("/v1/x", b"{}") for _ in range(20)))
        await client.post_everywhere("/v1/abort", b"all")
    assert one.count(b"{}") == two.count(b"{}") == 10
    assert one[-1] == two[-1] == b"all"
