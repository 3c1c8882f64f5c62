"""A server that answers canned completions, in a thread of this process, for tests of load clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Canned:
    """How the server answers, and what it was asked. `url` is set once it serves."""

    tokens: int | None = None
    """Tokens of an answer; None: as many as were asked for."""
    usage: bool = True
    done: bool = True
    """Whether a stream ends with `[DONE]` and an usage chunk of its own, as OpenAI's do, or with usage in its last
    chunk of text, as those of transformers."""
    status: int = 200
    fail_after: int | None = None
    """After so many tokens the stream brings an error."""
    pause: float = 0.0
    """Seconds before each token."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_at_once: int = 0


@contextlib.contextmanager
def canned_server(canned: Canned) -> Iterator[Canned]:
    """Serve `canned` on a free port of the loopback interface until the block ends."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", functools.partial(_complete, canned))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        canned.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(10)
        yield canned
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _complete(canned: Canned, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    canned.bodies.append(body)
    if canned.status != 200:
        return web.json_response({"error": {"message": "no", "param": "prompt"}}, status=canned.status)
    canned.running += 1
    canned.most_at_once = max(canned.most_at_once, canned.running)
    try:
        return await (_stream(canned, request, body) if body["stream"] else _whole(canned, body))
    finally:
        canned.running -= 1


async def _whole(canned: Canned, body: dict[str, Any]) -> web.Response:
    """`prompt` is a list of prompts."""
    await asyncio.sleep(canned.pause)
    prompts, tokens = body["prompt"], body["max_tokens"] if canned.tokens is None else canned.tokens
    choices = [{"index": i, "text": "a" * tokens, "finish_reason": "length"} for i in range(len(prompts))]
    usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": tokens * len(prompts), "total_tokens": 0}
    return web.json_response({"choices": choices, "usage": usage})


async def _stream(canned: Canned, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def send(data: Any) -> None:
        await response.write(b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n")

    tokens = body["max_tokens"] if canned.tokens is None else canned.tokens
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens, "total_tokens": 0}
    await response.write(b": ping\n\n")
    for i in range(tokens):
        await asyncio.sleep(canned.pause)
        if i == canned.fail_after:
            await send({"error": {"message": "the replica is gone"}})
            return response
        await send({"choices": [{"index": 0, "text": "a", "finish_reason": None}], "usage": None})
    if canned.usage and canned.done:
        await send({"choices": [], "usage": usage})
    if canned.usage and not canned.done:
        await send({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
    if canned.done:
        await send(b"[DONE]")
    return response
