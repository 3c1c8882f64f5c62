"""Private folders for socket files, gone or emptied when their user ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from toka.sockets import IPC_PATH_BYTES

REPLICA_NAME = re.compile(r"[A-Za-z0-9_-]{1,16}")
LONGEST_NAME = f"{'r' * 16}/plans-100"
"""The longest that is put after a folder's path."""


@contextlib.contextmanager
def run_folder(given: str) -> Iterator[Path]:
    """The folder `given`, made if it is missing, or a new one; private either way.

    At the end a new one is removed and a given one loses its socket files. Raises ValueError, in one
    sentence, where the folder cannot be had or another process uses it.
    """
    folder = Path(given).absolute() if given else _new_folder()
    try:
        if len(os.fsencode(folder / LONGEST_NAME)) > IPC_PATH_BYTES:
            raise ValueError(f"run_dir: the path {folder} is too long for socket files")
        with _locked(folder):
            try:
                yield folder
            finally:
                _remove_sockets(folder)
    finally:
        if not given:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"run_dir: {folder}: {error.strerror}") from None
    try:
        check_private(folder)
        _lock(folder, descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"run_dir: another process uses {folder}") from None


def check_replica_name(name: str) -> str:
    """`name` if a folder and a process can bear it; ValueError otherwise."""
    if not REPLICA_NAME.fullmatch(name):
        raise ValueError(f"replica: expected at most 16 letters, digits, - and _, got {name!r}")
    return name


def check_private(folder: Path) -> None:
    """Raises ValueError where others could reach the sockets in `folder`."""
    try:
        status = folder.stat()
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(f"the folder {folder} must be yours and private (chmod 700)")


def _new_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(tempfile.mkdtemp(prefix="toka-", dir=runtime if os.access(runtime, os.W_OK) else None))


def _remove_sockets(folder: Path) -> None:
    for path in list(folder.rglob("*")):
        if path.is_socket():
            path.unlink(missing_ok=True)
