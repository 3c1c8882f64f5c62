"""CURVE keys for tcp: files in a folder that `toka-keygen` makes, and who is admitted with them.

    server.key           the broker's public key             every host
    server.key_secret    its secret one                      the broker's host alone
    clients/*.key        public keys that are admitted       the broker's host alone
    client.key_secret    a client's pair                     hosts of frontends and workers

A file holds `public-key = "..."`, a secret one also `secret-key = "..."`, each 40 characters of Z85 (RFC 32): the
certificate files of other ZeroMQ programs fit, too.
"""

from __future__ import annotations

import contextlib
import logging
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

log = logging.getLogger(__name__)

SERVER_KEY = "server.key"
SERVER_SECRET = "server.key_secret"
CLIENT_SECRET = "client.key_secret"
CLIENTS = "clients"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client is to be admitted (RFC 27): a REP socket, bound before any server."""

_LINE = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40})"\s*$', re.MULTILINE)


@dataclass(frozen=True)
class Pair:
    """Two keys of 40 characters each."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class ClientKeys:
    own: Pair
    server: bytes
    """The broker's public key."""


def server_pair(folder: str) -> Pair:
    """What the broker needs; ValueError, in one sentence that names the file, where that is not there or not safe."""
    return _pair(Path(folder, SERVER_SECRET))


def client_keys(folder: str) -> ClientKeys:
    """What a frontend or a manager needs; ValueError as above."""
    return ClientKeys(own=_pair(Path(folder, CLIENT_SECRET)), server=public_key(Path(folder, SERVER_KEY)))


def public_key(path: Path) -> bytes:
    """The public key in `path`, 40 characters; ValueError where there is none."""
    return _read(path, "public")["public"]


def _pair(path: Path) -> Pair:
    keys = _read(path, "public", "secret")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(f"keys: {path} must be for you alone (chmod 600)")
    if zmq.curve_public(keys["secret"]) != keys["public"]:
        raise ValueError(f"keys: the two keys in {path} do not belong together")
    return Pair(**keys)


def _read(path: Path, *kinds: str) -> dict[str, bytes]:
    try:
        found = {kind.decode(): key for kind, key in _LINE.findall(path.read_bytes())}
    except OSError as error:
        raise ValueError(f"keys: cannot read {path}: {error.strerror}") from None
    for kind in kinds:
        if kind not in found or not _is_z85(found[kind]):
            raise ValueError(f"keys: {path} has no {kind} key")
    return {kind: found[kind] for kind in kinds}


def _is_z85(key: bytes) -> bool:
    try:
        z85.decode(key)
    except struct.error:
        # Of the right characters, but above 32 bits.
        return False
    return True


def protect_server(socket: zmq.Socket[bytes], folder: str) -> None:
    """Before `socket` is bound: whoever connects needs a key, and is admitted by the process's ZAP_ENDPOINT alone."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, server_pair(folder).secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"toka")
    # Without this, a server that nobody answers for admits everyone.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def protect_client(socket: zmq.Socket[bytes], folder: str) -> None:
    """Before `socket` is connected."""
    keys = client_keys(folder)
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)


class Whitelist:
    """The clients whose public keys lie in `folder`/clients, looked up anew whenever one connects.

    Raises ValueError for a file without a key. One that comes later is skipped, and logged.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder, CLIENTS)
        if not self._folder.is_dir():
            raise ValueError(f"keys: {self._folder} is not a folder")
        self._files = self._look()
        self._keys = {public_key(path) for path, *_ in self._files}

    def admits(self, key: bytes) -> bool:
        """Whether the client with this public key, 40 characters, is admitted."""
        files = self._look()
        if files != self._files:
            self._files = files
            self._keys = set(self._readable())
        return key in self._keys

    def answer(self, request: Sequence[bytes]) -> tuple[list[bytes], bytes]:
        """The reply to a request at ZAP_ENDPOINT; and the public key that it refuses, or nothing."""
        version, number, _domain, _address, _identity, mechanism, *credentials = request
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        admitted = self.admits(key)
        status, text = (b"200", b"") if admitted else (b"400", b"the key is not known")
        return [version, number, status, text, b"", b""], b"" if admitted else key

    def _look(self) -> list[tuple[Path, int, int]]:
        """The files, and what shows that one has changed."""
        files = []
        for path in sorted(self._folder.glob("*.key")):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((path, status.st_mtime_ns, status.st_size))
        return files

    def _readable(self) -> Iterator[bytes]:
        for path, *_ in self._files:
            try:
                yield public_key(path)
            except ValueError as error:
                log.warning("client skipped: %s", error)
