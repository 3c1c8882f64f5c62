"""Listening HTTP sockets, which the launcher opens and frontends inherit, or a frontend opens by itself.

Frontends that share a port accept from a socket of their own each, and the kernel spreads connections evenly.
(From one that all share, whoever wakes first takes the whole of a burst.) The launcher keeps them open while a
frontend is restarted: what connects meanwhile waits and is not refused.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BACKLOG = 4096
"""Connections that wait to be accepted: batch clients open thousands at once."""
UNIX = "unix:"
"""The host that stands for files in a private folder; in an address, what comes before the path of one."""
LISTEN_FDS = "TOKA_LISTEN_FDS"
"""The descriptors, with commas, that a part inherits."""

Sockets = list[socket.socket]
"""One for each address that a host name has."""


def listen(host: str, port: int, processes: int = 1) -> list[Sockets]:
    """Listen on `port` (0: any free one), with sockets for each of `processes`.

    Raises ValueError, in one sentence, where that is not possible.
    """
    try:
        with ExitStack() as opened:
            found = _listen(host, port, processes, opened)
            opened.pop_all()
            return found
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _listen(host: str, port: int, processes: int, opened: ExitStack) -> list[Sockets]:
    sets: list[Sockets] = [[] for _ in range(processes)]
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # Where none is there, opening the first says why.
    for family, kind, protocol, _, address in [each for each in found if _is_there(*each)] or found:
        for number, own in enumerate(sets):
            each = opened.enter_context(socket.socket(family, kind, protocol))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # The first is to fail where another server has the port, even one that would share it.
            if number:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind((address[0], port, *address[2:]))
            if not number and processes > 1:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = each.getsockname()[1]
            own.append(each)
    for own in sets:
        for each in own:
            each.listen(BACKLOG)
    return sets


def _is_there(family: int, kind: int, protocol: int, _: str, address: tuple[Any, ...]) -> bool:
    """Whether this machine has an address: names have IPv6 ones even where IPv6 is off or not in the kernel."""
    try:
        with socket.socket(family, kind, protocol) as tried:
            tried.bind((address[0], 0, *address[2:]))
    except OSError as error:
        return error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
    return True


def listen_privately(folder: Path, processes: int) -> list[Sockets]:
    """Listen at a file in `folder` for each of `processes`: no balance is struck between sockets of this kind."""
    sets: list[Sockets] = []
    for number in range(processes):
        path = folder / f"http-{number}"
        path.unlink(missing_ok=True)
        own = socket.socket(socket.AF_UNIX)
        own.bind(str(path))
        own.listen(BACKLOG)
        sets.append([own])
    return sets


def address(listening: socket.socket, host: str) -> str:
    """What is reached at `listening`: `http://HOST:PORT`, or `unix:PATH`."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"{UNIX}{name}"
    return f"http://[{host}]:{name[1]}" if ":" in host else f"http://{host}:{name[1]}"


def inherited() -> Sockets:
    """The sockets that this process was started with; none where nobody gave it any."""
    descriptors = os.environ.pop(LISTEN_FDS, "")
    sockets = [socket.socket(fileno=int(each)) for each in descriptors.split(",") if each]
    for each in sockets:
        each.set_inheritable(False)
    return sockets
