"""One frontend process: its socket, its start, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

import zmq
from aiohttp import web

from frontend.app import make_app
from frontend.engine import Engine
from frontend.errors import ApiError
from frontend.service import Service, load_model
from toka.config import Config
from toka.process import progress, ready
from toka.sockets import check_endpoint

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that wait to be accepted: batch clients open thousands at once."""
LAST_WORDS_SECONDS = 2.0
"""After shutdown_timeout: for calls that were ended to tell their clients so."""


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests finish. ValueError where it cannot start."""
    if not config.broker:
        raise ValueError("broker: the address of the broker is needed")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    service = Service(config, Engine(context, check_endpoint(config.broker)))
    engine = asyncio.create_task(service.engine.run())
    runner = web.AppRunner(make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=0)
    try:
        await runner.setup()
        url = await _listen(runner, config)
        stopped = asyncio.create_task(_run(service, url))
        await asyncio.wait({stopped, engine}, return_when=asyncio.FIRST_COMPLETED)
        for task in (engine, stopped):
            if task.done():
                task.result()
    finally:
        await runner.cleanup()
        engine.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await engine
        context.term()


async def _listen(runner: web.AppRunner, config: Config) -> str:
    """Open the HTTP port; the base URL."""
    try:
        await web.TCPSite(runner, config.host, config.port, backlog=BACKLOG).start()
    except OSError as error:
        raise ValueError(f"cannot listen on {config.host}:{config.port}: {_reason(error)}") from None
    port = runner.addresses[0][1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}"


def _reason(error: OSError) -> str:
    # uvloop puts the address before the reason, a second time.
    return os.strerror(error.errno) if error.errno else str(error)


async def _run(service: Service, url: str) -> None:
    """Load the tokenizer, serve, and drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    progress("reading the tokenizer", 0.0)
    service.model = await asyncio.to_thread(load_model, service.config)
    ready(url)
    await stop.wait()
    await _drain(service)


async def _drain(service: Service) -> None:
    service.draining = True
    log.info("draining", extra={"requests": len(service.calls)})
    if not await _idle(service, service.config.shutdown_timeout):
        for call in service.calls:
            call.fail(ApiError(503, "the server is shutting down", retry_after=1))
        await _idle(service, LAST_WORDS_SECONDS)


async def _idle(service: Service, seconds: float) -> bool:
    """Whether all requests were answered within `seconds`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(service.idle.wait(), seconds)
    return service.idle.is_set()
