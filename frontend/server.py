"""One frontend process: its socket, its start, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

import zmq
from aiohttp import web

from frontend.app import make_app
from frontend.batch_runner import running_batches
from frontend.engine import Engine
from frontend.errors import ApiError
from frontend.in_process import InProcess
from frontend.service import Service, load_model
from toka.config import Config
from toka.listen import BACKLOG, Sockets, address, inherited, listen
from toka.process import progress, ready, settle
from toka.sockets import check_endpoint

log = logging.getLogger(__name__)

BROKER_SECONDS = 2.0
"""To meet the broker before connections are accepted, and answered with 503 if need be."""
LAST_WORDS_SECONDS = 2.0
"""After shutdown_timeout: for calls that were ended to tell their clients so."""
CLOSE_SECONDS = 0.1
"""After that, for the connections of clients that do not read; to aiohttp, 0 would be for ever."""


async def serve(config: Config, number: int = 0) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests finish. ValueError where it cannot start.

    `number`: among the frontends that share a port.
    """
    if not config.broker:
        raise ValueError("broker: the address of the broker is needed")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    service = Service(config, Engine(context, check_endpoint(config.broker, config.keys), config.keys), number)
    engine = asyncio.create_task(service.engine.run())
    runner = web.AppRunner(
        make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_SECONDS
    )
    try:
        await runner.setup()
        stopped = asyncio.create_task(_run(service, runner))
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
        await service.close()


async def _run(service: Service, runner: web.AppRunner) -> None:
    """Open the port, serve, and drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    assert runner.server is not None, "it was set up"
    async with running_batches(service, InProcess(runner.server)):
        ready(await _open(service, runner))
        await stop.wait()
    await _drain(service)


async def _open(service: Service, runner: web.AppRunner) -> str:
    """Load the tokenizer, and accept connections; the base URL.

    Those to sockets of the launcher wait until they can be served, perhaps beside other frontends that can.
    A port of its own is opened first: it may be taken.
    """
    config = service.config
    if sockets := inherited():
        await _load(service)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BROKER_SECONDS):
                await service.engine.met.wait()
        return await _accept(runner, sockets, config.host)
    url = await _accept(runner, listen(config.host, config.port)[0], config.host)
    await _load(service)
    return url


async def _load(service: Service) -> None:
    progress("reading the tokenizer", 0.0)
    service.model = await asyncio.to_thread(load_model, service.config)
    settle()


async def _accept(runner: web.AppRunner, sockets: Sockets, host: str) -> str:
    for each in sockets:
        await web.SockSite(runner, each, backlog=BACKLOG).start()
    return address(sockets[0], host)


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
