"""Server-sent events: a response that goes on until its call is done, with a comment line in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_encoder = msgspec.json.Encoder()


class EventStream:
    """Writes events to one client.

    `send` returns when the connection's buffer has room again (aiohttp's limit, 64 KiB): what a slow
    client does not read yet waits with whoever calls, and no other stream does. `idle` is called after
    `ping_seconds` without an event, and should have `ping` called. `named`: the `type` of each event is its name.
    """

    def __init__(self, ping_seconds: float, idle: Callable[[], None], *, named: bool = False) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._named = named
        self._seconds, self._idle = ping_seconds, idle
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, request: web.Request) -> None:
        """Send the headers."""
        await self.response.prepare(request)
        self._tick()

    async def send(self, events: Sequence[dict[str, Any]], end: bytes = b"") -> None:
        """Send events in one write, with `end` behind them."""
        data = b"".join(map(self._encoded, events)) + end
        if data:
            self._written = self._loop.time()
            await self.response.write(data)

    async def ping(self) -> None:
        """Send the comment line if there was silence for so long."""
        if self._loop.time() - self._written >= self._seconds:
            await self.send((), PING)

    async def close(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response

    def stop(self) -> None:
        """No more comment lines."""
        if self._timer:
            self._timer.cancel()

    def _encoded(self, event: dict[str, Any]) -> bytes:
        name = b"event: " + event["type"].encode() + b"\n" if self._named else b""
        return name + b"data: " + _encoder.encode(event) + b"\n\n"

    def _tick(self) -> None:
        due = self._written + self._seconds
        if self._loop.time() >= due:
            self._idle()
            due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(due, self._tick)
