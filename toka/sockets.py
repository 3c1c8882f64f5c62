"""ZeroMQ sockets: one context a process, the same options everywhere, addresses checked.

The broker has one address. Frontends connect to it; workers connect to `worker_endpoint` of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from toka.messages import Frame, Message, MessageError, decode, encode

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 100_000
LINGER_MS = 2_000
HEARTBEAT_MS = 1_000
ZERO_COPY_BYTES = 65_536
MAX_MESSAGE_BYTES = 1 << 30
IPC_PATH_BYTES = 107
"""The longest path a Unix socket can have on Linux."""
YIELD_EVERY = 256
"""Messages read in a row before other tasks of the event loop get their turn."""
WATCHDOG_SECONDS = 1.0
"""Look at a socket this often even if its descriptor says nothing: a missed edge must not be a hang."""


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, identity: bytes = b"") -> zmq.Socket[bytes]:
    """A socket of `kind` with Toka's options; ROUTERs refuse unknown peers and let a restarted one in."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    return socket


def check_endpoint(endpoint: str) -> str:
    """`endpoint` if it is `ipc://path` or `tcp://loopback:port`; ValueError otherwise."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        path = endpoint.removeprefix("ipc://")
        if not path or len(worker_endpoint(endpoint)) - len("ipc://") > IPC_PATH_BYTES:
            raise ValueError(f"{endpoint}: an ipc address is ipc:// and a path of at most 99 bytes")
        return endpoint
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"{endpoint}: expected ipc://PATH or tcp://HOST:PORT")
    if not _is_loopback(parts.hostname):
        raise ValueError(f"{endpoint}: tcp without keys is refused unless the address is loopback")
    return endpoint


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def worker_endpoint(broker: str) -> str:
    """Where workers reach the broker whose address is `broker`: a path beside it, or the next port."""
    parts = urlsplit(broker)
    if parts.scheme == "ipc":
        return f"{broker}.workers"
    assert parts.port is not None
    return f"tcp://{parts.netloc.rsplit(':', 1)[0]}:{parts.port + 1}"


def is_made_up(identity: bytes) -> bool:
    """Whether a ROUTER made this identity up. Toka's peers all have one of their own, but where such a peer
    connects anew, what still waits in its former connection comes under a made-up one."""
    return identity.startswith(b"\0")


def unlink(endpoint: str) -> None:
    """Remove the socket file of an ipc endpoint this process has bound."""
    if endpoint.startswith("ipc://"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def send(socket: zmq.Socket[bytes], message: Message, route: Sequence[bytes] = ()) -> bool:
    """Send without waiting; False where the peer is gone or full (a ROUTER's peer, or a high-water mark)."""
    return send_frames(socket, [*route, *encode(message)])


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=all(len(f) < ZERO_COPY_BYTES for f in frames))
    except zmq.Again:
        log.warning("message dropped: the peer's queue is full")
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message's frames, or None where none waits."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def parse(frames: Sequence[Frame]) -> Message | None:
    """The message in `frames`, or None, logged, where they are not one: a bad peer ends no process."""
    try:
        return decode(frames)
    except MessageError as error:
        log.warning("message dropped: %s", error)
        return None


class Port:
    """A socket within asyncio. Sends do not wait; one task iterates over `messages`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._readable = asyncio.Event()

    def send(self, message: Message, route: Sequence[bytes] = ()) -> bool:
        return self.send_frames([*route, *encode(message)])

    def send_frames(self, frames: Sequence[Frame]) -> bool:
        sent = send_frames(self.socket, frames)
        # libzmq's descriptor is edge-triggered and a send may consume the edge of a message that arrived.
        self._readable.set()
        return sent

    async def messages(self) -> AsyncIterator[list[bytes]]:
        """Every message's frames: waits once, then reads until none is left (cheaper than one by one)."""
        loop = asyncio.get_running_loop()
        descriptor = self.socket.fileno()
        loop.add_reader(descriptor, self._readable.set)
        try:
            while True:
                self._readable.clear()
                for count in itertools.count(1):
                    frames = receive(self.socket)
                    if frames is None:
                        break
                    yield frames
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
                # Not wait_for: before Python 3.12 it may swallow a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCHDOG_SECONDS):
                        await self._readable.wait()
        finally:
            loop.remove_reader(descriptor)
