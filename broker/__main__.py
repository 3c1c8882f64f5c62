"""`toka-broker`, or `python -m broker`."""

from __future__ import annotations

import uvloop

from broker.server import serve
from toka.process import begin, command_line, fail, raise_file_limit


def main() -> None:
    config = command_line("toka-broker", "the queue between frontends and replicas", "broker")
    begin("broker", "toka: broker", config)
    raise_file_limit()
    if not config.broker:
        fail("broker: give the address to listen at, ipc://PATH or tcp://HOST:PORT")
    try:
        uvloop.run(serve(config))
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
