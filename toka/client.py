"""HTTP to a server of Toka: thousands of requests at once, each answered once however often it has to be sent."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp

from toka.listen import UNIX

BUSY = (429, 503)
"""Answers that say nothing about a request: it is sent again."""
BUSY_SECONDS = 1.0
"""Before it is, where the answer does not say when."""
FULL_SECONDS = 0.05
"""Before a socket is tried again at which too many connections wait."""
MOST_LOST = 8
"""Connections that may break under one request."""
BACKOFF_SECONDS = 0.25
"""Before the second try; doubled before each further one."""
OTHER_FILES = 256
"""Open files that are left for whatever else this process does."""


class Answer(NamedTuple):
    status: int
    body: bytes


class Client:
    """Sends requests to the servers at `addresses`, each time to the one with the fewest of them under way.

    `addresses` are `http://HOST:PORT` or `unix:PATH`. Every request that is under way takes a connection; those
    beyond what the limit on open files allows wait. To be made, used and closed in one event loop.
    """

    def __init__(self, addresses: Sequence[str], api_key: str = "") -> None:
        most = max(1, (_files() - OTHER_FILES) // len(addresses))
        self._bases = ["http://toka" if each.startswith(UNIX) else each for each in addresses]
        self._sessions = [_session(each, most, api_key) for each in addresses]
        self._under_way = [0] * len(addresses)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions:
            await session.close()

    async def post(self, path: str, body: bytes) -> Answer:
        """The answer, once there is one. ConnectionError, in one sentence, where connections keep breaking."""
        lost = 0
        while True:
            try:
                answer, later = await self._once(path, body)
            except aiohttp.ClientError as error:
                if getattr(error, "errno", None) == errno.EAGAIN:
                    await asyncio.sleep(FULL_SECONDS)
                    continue
                lost += 1
                if lost == MOST_LOST:
                    raise ConnectionError(f"the server cannot be reached: {error or type(error).__name__}") from None
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (lost - 1))
                continue
            if answer.status not in BUSY:
                return answer
            await asyncio.sleep(later)

    async def post_everywhere(self, path: str, body: bytes) -> None:
        """Once to each server; whether and what they answer does not matter."""
        for base, session in zip(self._bases, self._sessions):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(base + path, data=body) as response:
                    await response.read()

    async def _once(self, path: str, body: bytes) -> tuple[Answer, float]:
        """The answer, and in how many seconds the request may be made again."""
        place = self._under_way.index(min(self._under_way))
        self._under_way[place] += 1
        try:
            async with self._sessions[place].post(self._bases[place] + path, data=body) as response:
                return Answer(response.status, await response.read()), _seconds(response.headers.get("Retry-After"))
        finally:
            self._under_way[place] -= 1


def _session(address: str, connections: int, api_key: str) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    if address.startswith(UNIX):
        connector = aiohttp.UnixConnector(address.removeprefix(UNIX), limit=connections)
    else:
        connector = aiohttp.TCPConnector(limit=connections)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def _files() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _seconds(retry_after: str | None) -> float:
    try:
        return max(FULL_SECONDS, float(retry_after or BUSY_SECONDS))
    except ValueError:
        return BUSY_SECONDS  # A date.
