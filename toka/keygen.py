"""`toka-keygen`, or `python -m toka.keygen`: makes the keys that parts on several hosts need."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import zmq

from toka.folders import check_private
from toka.keys import CLIENT_SECRET, CLIENTS, SERVER_KEY, SERVER_SECRET, Pair, public_key
from toka.process import USAGE_ERROR, version

USAGE = """\
toka-keygen: keys for a broker that is reached over tcp

usage: toka-keygen DIR         a new folder with the keys of a broker and of its clients
       toka-keygen DIR NAME    keys for one more client, in DIR/NAME"""
FIRST = """\
Start every part with keys={0}, or with where it lies on its host:
  the broker's host needs {0}/server.key_secret and {0}/clients;
  hosts of frontends and workers need {0}/server.key and {0}/client.key_secret, and no more.
Copy them into a folder that is private there, by a safe way such as scp -p."""
MORE = """\
Copy {0}/{1} to that client's host, by a safe way such as scp -pr, and start its parts with keys= and its path.
Put {0}/clients/{1}.key into clients/ of the broker's host, if that is another one; the broker need not be restarted."""
NAME = re.compile(r"[A-Za-z0-9_-]+")


def main() -> None:
    args = sys.argv[1:]
    if "--help" in args or "-h" in args:
        print(USAGE)
    elif "--version" in args:
        print(f"toka-keygen {version()}")
    elif len(args) not in (1, 2) or args[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    else:
        try:
            print(add_client(Path(args[0]), args[1]) if len(args) == 2 else make_keys(Path(args[0])))
        except ValueError as error:
            print(f"toka-keygen: {error}", file=sys.stderr)
            sys.exit(1)


def make_keys(folder: Path) -> str:
    """Make `folder` with the keys of a broker and of its clients; what to do with them.

    Raises ValueError, in one sentence, where keys are there already or the folder cannot be had.
    """
    server, client = _new_pair(), _new_pair()
    _write(
        folder,
        {
            SERVER_SECRET: (server, True),
            SERVER_KEY: (server, False),
            CLIENT_SECRET: (client, True),
            f"{CLIENTS}/client.key": (client, False),
        },
    )
    return FIRST.format(folder)


def add_client(folder: Path, name: str) -> str:
    """Make the pair of one more client of the broker whose keys are in `folder`; what to do with it.

    `folder`/`name` is all that the client needs. Raises ValueError as above.
    """
    if not NAME.fullmatch(name) or name == CLIENTS:
        raise ValueError(f"expected a name of letters, digits, - and _ that is not {CLIENTS!r}, got {name!r}")
    server, client = public_key(folder / SERVER_KEY), _new_pair()
    _write(
        folder,
        {
            f"{name}/{CLIENT_SECRET}": (client, True),
            f"{name}/{SERVER_KEY}": (Pair(server, b""), False),
            f"{CLIENTS}/{name}.key": (client, False),
        },
    )
    return MORE.format(folder, name)


def _new_pair() -> Pair:
    return Pair(*zmq.curve_keypair())


def _write(folder: Path, files: Mapping[str, tuple[Pair, bool]]) -> None:
    """Write new files below `folder`, and their folders: each pair's public key, and its secret one where told so."""
    try:
        for path in map(folder.joinpath, files):
            if path.exists():
                raise ValueError(f"{path} is there already, and keys are not overwritten")
        for name, (pair, secret) in files.items():
            path = folder / name
            for parent in (folder, path.parent):
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_private(parent)
            _write_file(path, pair, secret)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None


def _write_file(path: Path, pair: Pair, secret: bool) -> None:
    lines = ["curve", f'    public-key = "{pair.public.decode()}"']
    if secret:
        lines.append(f'    secret-key = "{pair.secret.decode()}"')
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
