"""ZeroMQ sockets: one context a process, the same options everywhere, addresses checked.

The broker has one address. Frontends connect to it; workers connect to `worker_endpoint` of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from toka.keys import protect_client, protect_server
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
REPEAT_SECONDS = 60.0
"""Between warnings of one kind."""
_TCP = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([\w.*-]+)):(\d{1,5})", re.ASCII)
"""An IPv6 address in brackets; or a name, an IPv4 address, an interface, or * for all of them; and a port."""
LAST_PORT = 65534
"""The one after it is for the workers."""

_CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_DIFFERS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_NOT_ADMITTED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_NO_HANDSHAKE = "one side has no keys, or server.key is not the broker's own"
_REASONS = {
    # The one or the other, as it happens.
    _CLOSED: _NO_HANDSHAKE,
    _DIFFERS: _NO_HANDSHAKE,
    _NOT_ADMITTED: "the public key of client.key_secret is not among those that it admits",
}


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


def check_endpoint(endpoint: str, keys: str = "") -> str:
    """`endpoint` if it is `ipc://path` or `tcp://host:port`, the host loopback unless there are keys; or ValueError."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path or len(worker_endpoint(endpoint)) - len("ipc://") > IPC_PATH_BYTES:
            raise ValueError(f"{endpoint}: an ipc address is ipc:// and a path of at most 99 bytes")
        return endpoint
    found = _TCP.fullmatch(endpoint)
    if not found or not 1 <= int(found[3]) <= LAST_PORT:
        raise ValueError(f"{endpoint}: expected ipc://PATH or tcp://HOST:PORT, with a port from 1 to {LAST_PORT}")
    if not keys and not _is_loopback(found[1] or found[2]):
        raise ValueError(f"{endpoint}: tcp without keys is refused unless the address is loopback (see toka-keygen)")
    return endpoint


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def prepare(socket: zmq.Socket[bytes], endpoint: str, keys: str, *, server: bool = False) -> None:
    """What `socket` needs before it is bound (`server`) or connected to `endpoint`; ValueError for a bad key file."""
    if not is_tcp(endpoint):
        return
    # With this a name would mean its IPv6 address alone, and localhost no longer 127.0.0.1.
    socket.setsockopt(zmq.IPV6, any(mark in endpoint for mark in "[*"))
    if keys:
        (protect_server if server else protect_client)(socket, keys)


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


def listen(socket: zmq.Socket[bytes], endpoint: str, keys: str) -> str:
    """Bind `socket`, and say where it is then; ValueError where that cannot be, or for a bad key file."""
    prepare(socket, endpoint, keys, server=True)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot listen at {endpoint}: {error.strerror}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class Seldom:
    """A warning about what may happen thousands of times: logged the first time, and then once a minute at most."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._times, self._logged = 0, float("-inf")

    def warn(self, **details: object) -> None:
        self._times += 1
        now = time.monotonic()
        if now - self._logged >= REPEAT_SECONDS:
            log.warning(self._event, extra={**details, "times": self._times})
            self._times, self._logged = 0, now


class Handshakes:
    """What became of the handshakes of a tcp socket that failed. Close this before the socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], events: int) -> None:
        """`events`: those of zmq.EVENT_HANDSHAKE_FAILED_* that are of interest."""
        endpoint = f"inproc://handshakes-{secrets.token_hex(8)}"
        self._socket = socket
        self._events = context.socket(zmq.PAIR)
        # libzmq waits, with its one thread for all sockets, until there is room for an event.
        self._events.setsockopt(zmq.RCVHWM, 0)
        socket.monitor(endpoint, events)
        self._events.connect(endpoint)

    def failed(self) -> list[zmq.Event]:
        """The events since the last call. They take memory until this is called."""
        events = []
        while (frames := receive(self._events)) is not None:
            events.append(zmq.Event(parse_monitor_message(frames)["event"]))
        return events

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close()


class Connection:
    """A DEALER connected to the broker, with keys over tcp. `keep` has to be called about once a second.

    Raises ValueError where `endpoint` cannot be connected to or a key file is bad.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes, keys: str = "") -> None:
        self.socket = open_socket(context, zmq.DEALER, identity)
        self._endpoint = endpoint
        self._refused = Seldom("the broker refused the connection")
        self._handshakes: Handshakes | None = None
        prepare(self.socket, endpoint, keys)
        if is_tcp(endpoint):
            self._handshakes = Handshakes(context, self.socket, _CLOSED | _DIFFERS | _NOT_ADMITTED)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"cannot connect to {endpoint}: {error.strerror}") from None

    def keep(self) -> None:
        """Where the broker has refused the connection, say so and try again: its keys may change."""
        failed = self._handshakes.failed() if self._handshakes else []
        for event in failed:
            self._refused.warn(endpoint=self._endpoint, reason=_REASONS[event])
        # After such an answer libzmq gives up.
        if failed and failed[-1] != _CLOSED:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)

    def close(self) -> None:
        if self._handshakes:
            self._handshakes.close()
        self.socket.close()


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
