"""A replica's throughput on one GPU: `python -m tools.bench.gpu [shape=llama-1b] [workload=sharegpt:6000,monkeys] ...`.

Scheduler and executor run in this process, random weights, temperature 1, all requests at once. Every other
`key=value` is a setting of Toka, e.g. `max_seqs=4096` or `shared_prefix=false`; with `trace=path.json` the file has
the timeline of the last run, for `python -m tools.bench.trace path.json`. `workload=` runs none;
`rows=64,8:32000` also times decode steps of so many rows that start with so many tokens each (320 where not said). A
workload with stop ids runs again with the lengths that came out given.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from toka.config import Config, load
from toka.messages import StageReady
from toka.model import open_model
from toka.trace import QUEUED, Recorder
from tools.bench.manager import lengths, message
from tools.bench.workloads import SHAPES, Request, named
from workers.manager.__main__ import limits
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler

OWN = {"shape": "llama-1b", "workload": "sharegpt", "rows": "", "repeat": "1"}
CONTEXT = 320


class Replica:
    """A scheduler and an executor; `scheduler`: that of the last run."""

    def __init__(self, config: Config) -> None:
        from workers.stage.build import build
        from workers.stage.cuda.executor import CudaExecutor

        began = time.perf_counter()
        executor = build(config)
        assert isinstance(executor, CudaExecutor)
        self.executor, self.sizes = executor, executor.sizes
        source = open_model(config.model)
        self._limits = limits(
            config,
            source.config,
            [
                StageReady(
                    stage=0,
                    pages=self.sizes.pages,
                    max_seqs=self.sizes.max_seqs,
                    max_tokens_per_step=self.sizes.max_tokens,
                )
            ],
        )
        self._config = config
        self.start_seconds = time.perf_counter() - began

    def run(self, requests: list[Request]) -> dict[str, Any]:
        """Serve `requests` to their ends. Rates, and milliseconds of a step by what they were spent on."""
        from workers.stage.profile import Profile

        trace = Recorder("replica", "replica", on=bool(self._config.trace))
        trace.name_track("manager and stage")
        self.executor.observe(trace)
        profile = Profile(trace, self._config.trace_kernels, self.executor.device)
        began = time.perf_counter()
        scheduler = self.scheduler = Scheduler(self._limits, [], trace)
        for number, request in enumerate(requests):
            scheduler.submit(*message(number, request))
        submitted = time.perf_counter()
        spent = dict.fromkeys(("plan", "launch", "wait", "account"), 0.0)
        flying: deque[Sent] = deque()
        steps, busy, mixed, pages, rows, computed = 0, 0.0, 0, 0.0, 0, 0
        while True:
            clock = time.perf_counter()
            while len(flying) < self._config.run_ahead and (planned := scheduler.plan()) is not None:
                spent["plan"] += -clock + (clock := time.perf_counter())
                self.executor.submit(planned[0])
                flying.append(planned[1])
                mixed += len(planned[0].tokens) > len(planned[0].row_slots)
                rows += len(planned[0].row_slots)
                computed += len(planned[0].tokens)
                pages += scheduler.state.pages.held
                spent["launch"] += -clock + (clock := time.perf_counter())
                trace.count(QUEUED, plans=len(flying))
                profile.stepped()
            spent["plan"] += -clock + (clock := time.perf_counter())
            if not flying:
                break
            with trace.span("wait"):
                result = self.executor.collect()
            trace.count(QUEUED, plans=len(flying) - 1)
            spent["wait"] += -clock + (clock := time.perf_counter())
            with trace.span("account"):
                scheduler.result(flying.popleft(), result)
                scheduler.outputs(1)
            spent["account"] += time.perf_counter() - clock
            steps += 1
            busy += result.busy_us / 1e6
        ended = time.perf_counter()
        profile.end()
        if trace.on:
            trace.write(Path(self._config.trace))
        tokens = scheduler.accounting.tokens
        assert not scheduler.state.live
        assert tokens == sum(request.outputs for request in requests) or any(request.stop_ids for request in requests)
        return {
            "output_tokens_per_s": round(tokens / (ended - began)),
            "seconds": round(ended - began, 2),
            "submit_seconds": round(submitted - began, 2),
            "steps": steps,
            "mixed_steps": mixed,
            "rows_a_step": round(rows / steps),
            "steps_per_s": round(steps / (ended - submitted), 1),
            "gpu_ms_a_step": round(busy / steps * 1e3, 2),
            "outside_steps": round(1 - busy / (ended - submitted), 3),
            "pages_used": round(pages / steps / self.sizes.pages, 3),
            "preemptions": scheduler.state.preemptions,
            "computed_twice": round(scheduler.state.recomputed / computed, 4),
            "discarded": round(scheduler.accounting.discarded / tokens, 4),
            "ms_a_step": {name: round(seconds / steps * 1e3, 2) for name, seconds in spent.items()},
        }

    def time_decode(self, rows: int, context: int, steps: int = 300) -> dict[str, Any]:
        """Steps of `rows` rows that start with `context` tokens each."""
        prompt = np.random.default_rng(0).integers(10, 1000, (rows, context))
        return self.run([Request(ids.tolist(), steps) for ids in prompt])


def shape_folder(shape: str, to: Path) -> Path:
    """A model's folder with a config alone, for weights=random."""
    folder = to / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


def main() -> None:
    given = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
    own = OWN | {key: value for key, value in given.items() if key in OWN}
    settings = [f"{key}={value}" for key, value in given.items() if key not in OWN]
    with tempfile.TemporaryDirectory() as folder:
        model = shape_folder(own["shape"], Path(folder))
        replica = Replica(load([f"model={model}", "weights=random", "device=cuda", *settings], "worker"))
        print(json.dumps({"shape": own["shape"], "start_seconds": round(replica.start_seconds, 1)}), flush=True)
        for each in filter(None, own["rows"].split(",")):
            rows, _, context = each.partition(":")
            figures = replica.time_decode(int(rows), int(context or CONTEXT))
            print(json.dumps({"rows": each, **figures}), flush=True)
        for name, requests in named(own["workload"], SHAPES[own["shape"]]["vocab_size"]).items():
            for _ in range(int(own["repeat"])):
                print(json.dumps({"workload": name, "requests": len(requests), **replica.run(requests)}), flush=True)
            if any(request.stop_ids for request in requests):
                given_lengths = [Request(r.prompt, n) for r, n in zip(requests, lengths(replica.scheduler))]
                print(json.dumps({"workload": f"{name}, lengths given", **replica.run(given_lengths)}), flush=True)


if __name__ == "__main__":
    main()
