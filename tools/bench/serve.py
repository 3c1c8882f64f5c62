"""Throughput through HTTP: `python -m tools.bench.serve [shape=llama-1b] [workload=sharegpt:6000,monkeys] ...`.

Starts `toka` on random weights, sends all requests of a workload at once from `clients=4` processes (completions of
prompt ids, each a request of its own, not streamed, temperature 1), and prints a line of JSON for each workload:
output tokens a second from the first byte sent to the last one received, and the CPU seconds of each process of Toka.

`stage=null`: without a model, to see what everything around it can do. Every other `key=value` is a setting of Toka,
e.g. `frontends=4 max_seqs=4096`; with `model=` (empty: the demo model) that model runs in place of a shape.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from toka.model import open_model
from toka.process import raise_file_limit
from tools.bench.client import LoadError
from tools.bench.gpu import shape_folder
from tools.bench.null_stage import MODULE as NULL_SERVER
from tools.bench.servers import READY_LINE, Launch, Running, running
from tools.bench.workloads import SHAPES, Request, named

OWN = {"shape": "llama-1b", "workload": "sharegpt", "clients": "4", "stage": "real"}
RUN_SECONDS = 3600.0
"""The longest a workload may take."""
READY_SECONDS = 120.0
"""For all clients to have their requests prepared."""


class Share(NamedTuple):
    """One client's requests: where they go and their bodies."""

    url: str
    bodies: list[bytes]


class Sent(NamedTuple):
    """What one client saw; times in seconds of the machine's monotonic clock, the same for all processes."""

    began: float
    ended: float
    tokens: list[int]
    """Output tokens of each answer."""


_barrier: Barrier
"""Of this client process and the others: they begin together."""


def run(server: Running, requests: Sequence[Request], clients: int) -> dict[str, Any]:
    """Send all `requests` at once. Raises LoadError where the server does not do what was asked for."""
    shares = [Share(server.url, [_body(each) for each in requests[i::clients]]) for i in range(clients)]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(clients, _begin_client, (spawn.Barrier(clients),)) as pool:
        before = cpu_seconds(server.process)
        sent: list[Sent] = pool.map(_client, shares, chunksize=1)
        after = cpu_seconds(server.process)
    for i, each in enumerate(sent):
        _check(requests[i::clients], each.tokens)
    seconds = max(each.ended for each in sent) - min(each.began for each in sent)
    tokens = sum(sum(each.tokens) for each in sent)
    return {
        "output_tokens_per_s": round(tokens / seconds),
        "output_tokens": tokens,
        "requests": len(requests),
        "seconds": round(seconds, 4),
        "clients": clients,
        "cpu_seconds": {title: round(after[title] - before.get(title, 0.0), 2) for title in sorted(after)},
    }


def _body(request: Request) -> bytes:
    stops = {"stop_token_ids": request.stop_ids} if request.stop_ids else {"ignore_eos": True}
    body = {"prompt": request.prompt, "max_tokens": request.outputs, "temperature": 1.0, **stops}
    return json.dumps(body).encode()


def _check(requests: Sequence[Request], tokens: Sequence[int]) -> None:
    for request, count in zip(requests, tokens, strict=True):
        if count > request.outputs or (count < request.outputs and not request.stop_ids):
            raise LoadError(f"{count} tokens came, {request.outputs} were asked for")


def cpu_seconds(server: psutil.Process) -> dict[str, float]:
    """Of each process of Toka that runs, by its title."""
    seconds: dict[str, float] = {}
    for process in [server, *server.children(recursive=True)]:
        title = " ".join(process.cmdline()).strip()
        if title.startswith("toka: "):
            times = process.cpu_times()
            seconds[title] = times.user + times.system
    return seconds


# --- A client process ---------------------------------------------------------------------------------


def _begin_client(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier
    raise_file_limit()


def _client(share: Share) -> Sent:
    return uvloop.run(_send_all(share))


async def _send_all(share: Share) -> Sent:
    timeout = aiohttp.ClientTimeout(total=RUN_SECONDS)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        share.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as session:
        _barrier.wait(READY_SECONDS)
        began = time.monotonic()
        try:
            answers = await asyncio.gather(*(_send(session, body) for body in share.bodies))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LoadError(f"{share.url}: {error or type(error).__name__}") from None
        ended = time.monotonic()
    return Sent(began, ended, [json.loads(answer)["usage"]["completion_tokens"] for answer in answers])


async def _send(session: aiohttp.ClientSession, body: bytes) -> bytes:
    async with session.post("/v1/completions", data=body) as response:
        answer = await response.read()
        if response.status != 200:
            raise LoadError(f"status {response.status}: {answer[:300]!r}")
        return answer


# --- The server ---------------------------------------------------------------------------------------


SPACE = "\u0120"
"""How byte-level vocabularies write a space."""


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer of `size` tokens, all bytes and then words of four letters, for decoding alone."""
    words = (SPACE + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    tokens = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    vocabulary = {token: number for number, token in enumerate(itertools.islice(tokens, size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def launch(stage: str, settings: Sequence[str]) -> Launch:
    module = NULL_SERVER if stage == "null" else "toka"
    command = [sys.executable, "-m", module, "port=0", *settings]
    return Launch(command, lambda log: found[1] if (found := READY_LINE.search(log)) else None)


def main() -> None:
    given = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
    own = OWN | {key: value for key, value in given.items() if key in OWN}
    settings = {key: value for key, value in given.items() if key not in OWN}
    with tempfile.TemporaryDirectory() as folder:
        if "model" not in settings:
            made = shape_folder(own["shape"], Path(folder))
            write_tokenizer(made, SHAPES[own["shape"]]["vocab_size"])
            settings |= {"model": str(made), "weights": "random"}
        vocabulary = open_model(settings["model"]).config.vocab_size
        with running("toka", launch(own["stage"], [f"{key}={value}" for key, value in settings.items()])) as server:
            for name, requests in named(own["workload"], vocabulary).items():
                figures = run(server, requests, int(own["clients"]))
                line = {"workload": name, "frontends": int(settings.get("frontends", "1")), **figures}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
