"""A replica's matcher as a process: `python -m workers.matcher`, started beside its manager.

It has nothing to do, and is small, until the first request with a grammar comes.
"""

from __future__ import annotations

import signal
import sys

import zmq

from toka import process
from toka.config import Config
from toka.placement import take_cores
from toka.sockets import listen, open_socket, unlink
from workers import endpoints
from workers.matcher.grammars import Grammars
from workers.matcher.loop import Loop


def serve(config: Config) -> None:
    """ValueError where its socket cannot be bound, or a key file is bad."""
    last = range(config.pp_size * config.tp_size)[-config.tp_size :]
    endpoint = endpoints.matcher(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with endpoints.admitting(context, config):
        socket, grammars = open_socket(context, zmq.ROUTER), Grammars(config.model)
        listen(socket, endpoint, config.keys)
        process.settle()
        process.ready()
        Loop(socket, grammars, last).run()
        grammars.close()
        socket.close()
    unlink(endpoint)
    context.term()


def main() -> None:
    take_cores()
    config = process.command_line("toka-matcher", "keeps outputs to their grammars", "worker")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    process.begin("matcher", f"toka: matcher {config.replica}", config)
    try:
        serve(config)
    except ValueError as error:
        process.fail(str(error))


if __name__ == "__main__":
    main()
