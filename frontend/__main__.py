"""`toka-frontend`: HTTP in front of a broker."""

from __future__ import annotations

import uvloop

from frontend.server import serve
from toka.process import begin, command_line, fail, raise_file_limit


def main() -> None:
    config = command_line("toka-frontend", "HTTP in front of a broker", "frontend")
    begin("frontend", "toka: frontend", config)
    raise_file_limit()
    try:
        uvloop.run(serve(config))
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
