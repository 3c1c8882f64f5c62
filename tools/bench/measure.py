"""The measurements of one running server."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench.client import (
    LoadError,
    Request,
    Round,
    batch_completion,
    completion,
    random_prompts,
    run_round,
    text_completion,
)
from tools.bench.servers import Running


@dataclass(frozen=True)
class Load:
    """What one round sends at once."""

    clients: int
    input_tokens: int
    output_tokens: int
    temperature: float = 0.0

    def requests(self, model: str, seed: str, prefix: int = 0) -> list[Request]:
        """Prompts of random ids, behind `prefix` random ids common to all; others for another seed."""
        common = random_prompts(1, prefix, f"{seed} prefix")[0]
        prompts = random_prompts(self.clients, self.input_tokens, seed, common)
        return [completion(model, prompt, self.output_tokens, self.temperature) for prompt in prompts]

    def batch(self, model: str, seed: str) -> list[Request]:
        """All prompts in one request that is not streamed: what a call of `generate` is."""
        prompts = random_prompts(self.clients, self.input_tokens, seed)
        return [batch_completion(model, prompts, self.output_tokens)]

    def texts(self, model: str, seed: str) -> list[Request]:
        """As `requests`, for servers that take no ids."""
        numbered = range(self.clients)
        return [text_completion(model, self.input_tokens, self.output_tokens, f"{seed} {i}") for i in numbered]


def serve(server: Running, make: Callable[[str, str], list[Request]], rounds: int) -> dict[str, Any]:
    """Medians over `rounds` of the requests that `make` gives for a model and a seed, after a warm-up.

    `ttft` and `itl` in seconds.
    """
    name = make.__name__
    run_round(server.url, make(server.model, f"{name} warm-up"))
    done = [run_round(server.url, make(server.model, f"{name} {i}")) for i in range(rounds)]
    speeds = [each.tokens_per_second for each in done]
    return {
        "tokens_per_second": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "ttft": statistics.median(each.ttft for each in done),
        "itl": statistics.median(each.itl for each in done),
        "rounds": [asdict(each) for each in done],
    }


def shared_prefix(server: Running, load: Load, rounds: int, prefix: int) -> dict[str, Any]:
    """Seconds of a round with a common prefix that no earlier round had, of one without, and their ratio.

    The two take turns, so that a machine that slows down slows both.
    """
    with_prefix: list[Round] = []
    without: list[Round] = []
    run_round(server.url, load.requests(server.model, "prefix warm-up", prefix))
    for i in range(rounds):
        without.append(run_round(server.url, load.requests(server.model, f"without prefix {i}")))
        with_prefix.append(run_round(server.url, load.requests(server.model, f"prefix {i}", prefix)))
        if with_prefix[-1].prompt_tokens != without[-1].prompt_tokens + load.clients * prefix:
            raise LoadError(f"{server.name}: the prompts were not taken whole")
    seconds = [statistics.median(each.seconds for each in kind) for kind in (with_prefix, without)]
    return {
        "seconds": seconds[0],
        "seconds_without": seconds[1],
        "ratio": seconds[0] / seconds[1],
        "rounds": [asdict(each) for each in with_prefix],
        "rounds_without": [asdict(each) for each in without],
    }


def memory(server: Running) -> dict[str, dict[str, Any]]:
    """Of each of Toka's processes by its title: resident MB (10^6 bytes), and whether torch is mapped."""
    parts: dict[str, dict[str, Any]] = {}
    for process in [server.process, *server.process.children(recursive=True)]:
        title = " ".join(process.cmdline()).strip()
        if title.startswith("toka: "):
            mapped = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
            parts[title] = {"resident_mb": process.memory_info().rss / 1e6, "torch": mapped}
    return parts
