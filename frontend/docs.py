"""The server's documentation: what it says of itself to programs, and a page for people that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from aiohttp import web

from frontend.openapi import JSON, Route, document
from toka.process import version

PAGE = Path(__file__).with_name("docs.html")
ALLOWED = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The page asks nobody else for anything."""


class DocsRoutes:
    """`routes`: all that the server has, once it serves."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    async def document(self, request: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type=JSON)

    async def page(self, request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": ALLOWED}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document(self._routes, version()))

    @cached_property
    def _page(self) -> str:
        return PAGE.read_text()
