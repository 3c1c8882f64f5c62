"""The broker as a process: two ROUTER sockets, a clock and the signals around `core`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from broker import frontends, recovery, replicas
from broker.core import PING_SECONDS, Broker
from broker.gate import Gate
from broker.queue import WaitingQueue
from toka.config import Config
from toka.folders import check_private
from toka.messages import Frame
from toka.process import ready
from toka.sockets import Port, check_endpoint, is_tcp, listen, open_socket, unlink, worker_endpoint

Receive = Callable[[Broker, bytes, Sequence[Frame]], None]


async def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT; raises ValueError where the address cannot be taken."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stop, drained = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    endpoints = (check_endpoint(config.broker, config.keys), worker_endpoint(config.broker))
    gate = Gate(context, config.keys) if config.keys and is_tcp(config.broker) else None
    front, back = (Port(bind(context, endpoint, config.keys)) for endpoint in endpoints)
    broker = Broker(
        WaitingQueue(config.queue_requests, config.queue_bytes),
        to_frontend=lambda identity, frames: front.send_frames([identity, *frames]),
        to_replica=lambda identity, frames: back.send_frames([identity, *frames]),
        incarnation=secrets.randbits(63),
    )
    ready(config.broker)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_read(front, broker, frontends.receive)),
                tasks.create_task(_read(back, broker, replicas.receive)),
                tasks.create_task(_tick(broker, drained)),
            ]
            if gate:
                gate.watch([front.socket, back.socket])
                running.append(tasks.create_task(gate.run()))
            await stop.wait()
            broker.drain()
            if not broker.idle:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(drained.wait(), config.shutdown_timeout)
            for task in running:
                task.cancel()
    finally:
        if gate:
            gate.close()
        context.destroy()
        for endpoint in endpoints:
            unlink(endpoint)


def bind(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: str = "") -> zmq.Socket[bytes]:
    """A ROUTER bound to `endpoint`; ValueError in one sentence where that is not safe or not possible."""
    if endpoint.startswith("ipc://"):
        _check_path(Path(endpoint.removeprefix("ipc://")))
    router = open_socket(context, zmq.ROUTER)
    listen(router, endpoint, keys)
    return router


def _check_path(path: Path) -> None:
    """A socket file is as safe as its folder; and binding takes the file away from whoever listens there."""
    check_private(path.parent)
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        raise ValueError(f"another process listens at {path}")


async def _read(port: Port, broker: Broker, receive: Receive) -> None:
    async for sender, *frames in port.messages():
        receive(broker, sender, frames)


async def _tick(broker: Broker, drained: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(PING_SECONDS)
        recovery.settle(broker)
        broker.tick()
        if broker.draining and broker.idle:
            drained.set()
