"""`toka-worker`, or `python -m workers`: one replica, its manager and its stage, started and supervised."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from toka.config import Config
from toka.folders import check_replica_name, run_folder
from toka.keys import client_keys
from toka.launcher import replica_unit, supervise
from toka.process import begin, command_line, fail, ready
from toka.sockets import check_endpoint, is_tcp
from toka.trace import gathered

log = logging.getLogger(__name__)


def main() -> None:
    config = command_line("toka-worker", "a replica: loads the model and computes", "worker")
    name = config.replica or f"r-{secrets.token_hex(3)}"
    begin("worker", f"toka: worker {name}", config)
    try:
        if not config.broker:
            raise ValueError("broker: give the broker's address, ipc://PATH or tcp://HOST:PORT")
        if is_tcp(check_endpoint(config.broker, config.keys)) and config.keys:
            # Before the manager does, which waits until the weights are loaded.
            client_keys(config.keys)
        check_replica_name(name)
        own = str(Path(config.run_dir, name)) if config.run_dir else ""
        with run_folder(own) as folder, gathered(config.trace, folder):
            status = asyncio.run(serve(config, name, folder))
    except ValueError as error:
        fail(str(error))
    sys.exit(status)


async def serve(config: Config, name: str, folder: Path) -> int:
    """Run the replica `name` with its socket files in `folder`; the exit status."""

    async def on_ready(texts: Mapping[str, str]) -> None:
        ready(f"{name} at {config.broker}")

    return await supervise(config, [replica_unit(config, name, folder)]).run(on_ready)


if __name__ == "__main__":
    main()
