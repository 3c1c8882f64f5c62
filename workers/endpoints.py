"""Where the manager of a replica, its matcher and its stages find each other.

On one host in the replica's folder. Over several, `rendezvous` has the results, the ports behind it the plans of each
stage, then torch.distributed and the matcher.
"""

from __future__ import annotations

import contextlib
import socket as network
from collections.abc import Iterator
from threading import Event, Thread
from urllib.parse import urlsplit

import zmq

from toka.config import Config
from toka.keys import ZAP_ENDPOINT, Whitelist
from toka.sockets import Seldom, open_socket

POLL_MS = 200
MANAGER = b"manager"
"""What the matcher knows the manager as."""


def results(config: Config) -> str:
    return config.rendezvous or f"ipc://{config.run_dir}/results"


def plans(config: Config, stage: int) -> str:
    return _behind(config, 1 + stage) if config.rendezvous else f"ipc://{config.run_dir}/plans-{stage}"


def meeting(config: Config, token: str) -> str:
    """For torch.distributed, and all stages of one start of the replica, which has a `token` of its own."""
    place = 1 + config.pp_size * config.tp_size
    return _behind(config, place) if config.rendezvous else f"file://{config.run_dir}/meet-{token}"


def matcher(config: Config) -> str:
    place = 2 + config.pp_size * config.tp_size
    return _behind(config, place) if config.rendezvous else f"ipc://{config.run_dir}/matcher"


def stage_name(stage: int) -> bytes:
    """What the matcher knows a stage as."""
    return b"stage-%d" % stage


def _behind(config: Config, ports: int) -> str:
    host, port = config.rendezvous.removeprefix("tcp://").rsplit(":", 1)
    return f"tcp://{host}:{int(port) + ports}"


def inbox(config: Config, stage: int) -> str:
    """Where other stages reach this one; over several hosts any port of the address that faces node 0."""
    if not config.rendezvous:
        return f"ipc://{config.run_dir}/stage-{stage}"
    found = urlsplit(config.rendezvous)
    family, kind, protocol, _, address = network.getaddrinfo(found.hostname, found.port, type=network.SOCK_DGRAM)[0]
    with network.socket(family, kind, protocol) as facing:
        # Nothing is sent: this asks which address of this host leads there.
        facing.connect(address)
        own = str(facing.getsockname()[0])
    return f"tcp://[{own}]:*" if ":" in own else f"tcp://{own}:*"


@contextlib.contextmanager
def admitting(context: zmq.Context[zmq.Socket[bytes]], config: Config) -> Iterator[None]:
    """Answer for what this process binds, where the replica has several hosts: the clients of `keys` may connect."""
    if not (config.rendezvous and config.keys):
        yield
        return
    whitelist, asked, ended = Whitelist(config.keys), open_socket(context, zmq.REP), Event()
    asked.bind(ZAP_ENDPOINT)
    thread = Thread(target=_answer, args=(whitelist, asked, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _answer(whitelist: Whitelist, asked: zmq.Socket[bytes], ended: Event) -> None:
    refused = Seldom("a stage was refused: its key is not in the clients folder")
    while not ended.is_set():
        if asked.poll(POLL_MS):
            answer, key = whitelist.answer(asked.recv_multipart())
            asked.send_multipart(answer)
            if key:
                refused.warn(key=key.decode())
    asked.close()
