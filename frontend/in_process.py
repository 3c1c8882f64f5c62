"""Requests to the server's own routes without a socket: the same handlers, the same errors."""

from __future__ import annotations

import asyncio

from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL


class InProcess:
    """Calls the handlers of a server. `server`: that of a runner which was set up."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._protocol = server()
        """Never connected: requests want to know whose they are."""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes, float]:
        """The status and body of the answer, and its Retry-After in seconds; 0 where it has none."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        headers = CIMultiDict({"Content-Type": "application/json", "Content-Length": str(len(body))})
        raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
        message = RawRequestMessage(
            "POST", path, HttpVersion11, CIMultiDictProxy(headers), raw, False, None, False, False, URL(path)
        )
        content = StreamReader(self._protocol, len(body) + 1, loop=loop)
        content.feed_data(body)
        content.feed_eof()
        writer = StreamWriter(self._protocol, loop)
        request = self._server.request_factory(message, content, self._protocol, writer, task)
        response = await self._server.request_handler(request)
        assert isinstance(response, web.Response) and isinstance(response.body, bytes), "no route streams unasked"
        return response.status, response.body, float(response.headers.get("Retry-After", 0))
