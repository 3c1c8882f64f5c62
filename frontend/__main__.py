"""`toka-frontend`: HTTP in front of a broker. One of several that share a port has its number in TOKA_FRONTEND."""

from __future__ import annotations

import os

import uvloop

from frontend.server import serve
from toka.process import begin, command_line, fail, raise_file_limit


def main() -> None:
    config = command_line("toka-frontend", "HTTP in front of a broker", "frontend")
    number = os.environ.get("TOKA_FRONTEND", "")
    begin("frontend", f"toka: frontend {number}".strip(), config)
    raise_file_limit()
    try:
        uvloop.run(serve(config, int(number or 0)))
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
