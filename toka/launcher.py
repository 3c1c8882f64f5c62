"""`toka`: the whole server on one machine, its parts started and supervised as processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from toka.child import Part
from toka.config import Config, arguments
from toka.display import display
from toka.folders import check_replica_name, run_folder
from toka.listen import UNIX, listen, listen_privately
from toka.placement import Place, own_stages, places
from toka.process import begin, command_line, fail, ready, supervised
from toka.sockets import check_endpoint, unlink, worker_endpoint
from toka.supervisor import Supervisor, Unit
from toka.trace import gathered

EXAMPLE = {"messages": [{"role": "user", "content": "Tell me a joke."}], "max_tokens": 100, "stream": True}
POLL_SECONDS = 0.02
STAGE = "workers.stage"

log = logging.getLogger(__name__)


def main(stage: str = STAGE) -> None:
    """`stage`: the module that runs as a replica's stages (measurements have one without a model)."""
    config = command_line("toka", "an LLM inference server, the whole of it on one machine")
    begin("toka", "toka: launcher", config, orphaned=signal.SIGTERM)
    try:
        with run_folder(config.run_dir) as folder, gathered(config.trace, folder):
            status = asyncio.run(serve(config, folder, stage))
    except ValueError as error:
        fail(str(error))
    sys.exit(status)


async def serve(config: Config, folder: Path, stage: str = STAGE) -> int:
    """Run the server with its socket files in `folder`; the exit status."""
    if config.nodes > 1:
        raise ValueError("nodes: `toka` is for one host; start toka-worker on each, and toka-broker and toka-frontend")
    broker = check_endpoint(config.broker or f"ipc://{folder}/broker", config.keys)
    config = dataclasses.replace(config, broker=broker, run_dir=str(folder))
    replicas = replica_units(config, folder, stage)
    frontends = frontend_units(config)
    units = [
        *frontends,
        *replicas,
        Unit("broker", [Part("broker", "broker", arguments(config, "broker"))]),
    ]
    began = time.monotonic()

    async def on_ready(texts: Mapping[str, str]) -> None:
        urls = list(dict.fromkeys(texts[each.name] for each in frontends))
        await until_serving(urls, frontends)
        log.info("ready", extra={"url": urls[0], "seconds": time.monotonic() - began})
        if supervised():
            ready("\n".join(urls))
            return
        # A pipe that is closed or a disk that is full; unbuffered, since Python fails if it cannot flush at its end.
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), f"{example(urls[0])}\n".encode())

    try:
        return await supervise(config, units).run(on_ready)
    finally:
        # A broker that was killed has left them.
        for endpoint in (broker, worker_endpoint(broker)):
            unlink(endpoint)


def supervise(config: Config, units: Sequence[Unit]) -> Supervisor:
    return Supervisor(
        units,
        display([part.name for unit in units for part in unit.parts]),
        start_timeout=config.start_timeout,
        shutdown_timeout=config.shutdown_timeout,
        restart_limit=config.restart_limit,
    )


def frontend_units(config: Config) -> list[Unit]:
    """The frontends, each with sockets of its own on the one port; ValueError where that cannot be had."""
    args = arguments(config, "frontend")
    if config.host == UNIX:
        listening = listen_privately(Path(config.run_dir), config.frontends)
    else:
        listening = listen(config.host, config.port, config.frontends)
    numbers = map(str, range(config.frontends)) if config.frontends > 1 else [""]
    return [
        Unit("frontend", [Part(f"frontend {number}".strip(), "frontend", args, {"TOKA_FRONTEND": number}, sockets)])
        for number, sockets in zip(numbers, listening)
    ]


def replica_units(config: Config, folder: Path, stage: str = STAGE) -> list[Unit]:
    """The replicas, each with a folder of its own in `folder`; ValueError where they cannot have their GPUs."""
    names = [check_replica_name(name) for name in replica_names(config)]
    units = []
    for name, place in zip(names, places(config, config.dp_size)):
        sockets = folder / name
        sockets.mkdir(mode=0o700, exist_ok=True)
        units.append(replica_unit(config, name, sockets, stage, place))
    return units


def replica_names(config: Config) -> list[str]:
    """r0, r1, ...; with a name given NAME, or NAME-0, NAME-1, ... where there are several."""
    if config.dp_size == 1:
        return [config.replica or "r0"]
    prefix = f"{config.replica}-" if config.replica else "r"
    return [f"{prefix}{number}" for number in range(config.dp_size)]


def replica_unit(config: Config, name: str, sockets: Path, stage: str = STAGE, place: Place | None = None) -> Unit:
    """The replica `name`, its manager, matcher and stages, with the sockets between them in the folder `sockets`.

    Of a replica over several hosts what is this one's.
    Without a `place` it gets one as if it were alone on this machine.
    """
    place = place or places(config, 1)[0]
    own = dataclasses.replace(config, replica=name, run_dir=str(sockets), threads=place.threads)
    args = arguments(own, "worker")
    stages = [
        Part(f"stage {name}.{number}", stage, args, {"TOKA_STAGE": str(number)} | env)
        for number, env in zip(own_stages(config), place.stages)
    ]
    both = ("manager", "matcher") if config.node_rank == 0 else ()
    return Unit(
        "replica", [*(Part(f"{each} {name}", f"workers.{each}", args, place.manager) for each in both), *stages]
    )


async def until_serving(urls: Sequence[str], frontends: Sequence[Unit]) -> None:
    """Wait until every frontend at `urls` has said that it can serve: parts may be ready and not have met yet.

    Which of those at one URL answers is by chance. One that is given up meanwhile is not waited for.
    """
    serving: set[int] = set()
    asked = itertools.cycle(urls)
    while any(number not in serving and not unit.gave_up for number, unit in enumerate(frontends)):
        number = await answers(next(asked))
        if number is None or number in serving:
            await asyncio.sleep(POLL_SECONDS)
        else:
            serving.add(number)


async def answers(url: str) -> int | None:
    """The number of the frontend that answers GET /ready with 200; None where one does not."""
    parts = urlsplit(reachable(url))
    try:
        if parts.scheme == "unix":
            reader, writer = await asyncio.open_unix_connection(parts.path)
        else:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(f"GET /ready HTTP/1.0\r\nHost: {parts.netloc or 'toka'}\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            return int(json.loads(body)["frontend"]) if b" 200 " in head.partition(b"\r\n")[0] else None
        finally:
            writer.close()
    except (OSError, ValueError):
        # Refused, or cut off: it died.
        return None


def reachable(url: str) -> str:
    """`url` with an address of this machine where it has the one that stands for all."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def example(url: str) -> str:
    """A line for a shell that streams an answer from the server at `url`."""
    base = f"--unix-socket {url.removeprefix(UNIX)} http://toka" if url.startswith(UNIX) else reachable(url)
    path, body = f"{base}/v1/chat/completions", json.dumps(EXAMPLE)
    return f"curl -N {path} -H 'Content-Type: application/json' -d '{body}'"
