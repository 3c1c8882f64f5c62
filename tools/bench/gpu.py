"""A replica's throughput on one GPU: `python -m tools.bench.gpu [shape=llama-1b] [workload=sharegpt] [count=0] ...`.

Scheduler and executor run in this process, random weights, temperature 1, all requests at once. Every other
`key=value` is a setting of Toka, e.g. `max_seqs=4096` or `shared_prefix=false`. `workload` may name several, with
commas; `rows=N,M context=320` also times decode steps of so many rows that start with so many tokens each.
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
from toka.messages import SamplingParams, StageReady, Submit, Work
from toka.model import open_model
from tools.bench.workloads import SHAPES, WORKLOADS, Request
from workers.manager.__main__ import limits
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler

OWN = {"shape": "llama-1b", "workload": "sharegpt", "count": "0", "rows": "", "context": "320", "repeat": "1"}


class Replica:
    """A scheduler and an executor; `spent`: seconds by what the one thread was doing."""

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
        self._depth = config.run_ahead
        self.start_seconds = time.perf_counter() - began

    def run(self, requests: list[Request]) -> dict[str, Any]:
        """Serve `requests` to their ends. Rates, and milliseconds of a step by what they were spent on."""
        began = time.perf_counter()
        scheduler = Scheduler(self._limits, [])
        for number, (prompt, outputs) in enumerate(requests):
            _submit(scheduler, number, prompt, outputs)
        submitted = time.perf_counter()
        spent = dict.fromkeys(("plan", "launch", "wait", "account"), 0.0)
        flying: deque[Sent] = deque()
        steps, busy, mixed, pages, rows = 0, 0.0, 0, 0.0, 0
        while True:
            clock = time.perf_counter()
            while len(flying) < self._depth and (planned := scheduler.plan()) is not None:
                spent["plan"] += -clock + (clock := time.perf_counter())
                self.executor.submit(planned[0])
                flying.append(planned[1])
                mixed += len(planned[0].tokens) > len(planned[0].row_slots)
                rows += len(planned[0].row_slots)
                pages += scheduler.state.pages.held
                spent["launch"] += -clock + (clock := time.perf_counter())
            spent["plan"] += -clock + (clock := time.perf_counter())
            if not flying:
                break
            result = self.executor.collect()
            spent["wait"] += -clock + (clock := time.perf_counter())
            scheduler.result(flying.popleft(), result)
            scheduler.outputs(1)
            spent["account"] += time.perf_counter() - clock
            steps += 1
            busy += result.busy_us / 1e6
        ended = time.perf_counter()
        tokens = sum(outputs for _, outputs in requests)
        assert scheduler.accounting.tokens == tokens and not scheduler.state.live
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
            "discarded": scheduler.accounting.discarded,
            "ms_a_step": {name: round(seconds / steps * 1e3, 2) for name, seconds in spent.items()},
        }

    def time_decode(self, rows: int, context: int, steps: int = 300) -> dict[str, Any]:
        """Steps of `rows` rows that start with `context` tokens each."""
        prompt = np.random.default_rng(0).integers(10, 1000, (rows, context))
        return self.run([(ids.tolist(), steps) for ids in prompt])


def _submit(scheduler: Scheduler, number: int, prompt: list[int], outputs: int) -> None:
    params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=1.0, seed=number)
    ids = np.array(prompt, np.int32)
    work = Work(params=params, samples=[0], output_counts=[0], prompt=ids, outputs=np.empty(0, np.int32))
    assert scheduler.check(work) == ""
    header = Submit(
        frontend=b"f-bench",
        request=number.to_bytes(16, "big"),
        first_sample=0,
        sequences=1,
        prompt_tokens=len(prompt),
        priority=0,
        page_hashes=b"",
        payload=[],
    )
    scheduler.submit(header, work)


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
        for rows in filter(None, own["rows"].split(",")):
            print(json.dumps({"rows": int(rows), **replica.time_decode(int(rows), int(own["context"]))}), flush=True)
        for name in filter(None, own["workload"].split(",")):
            count = {"count": int(own["count"])} if int(own["count"]) else {}
            requests = WORKLOADS[name](**count, vocabulary=SHAPES[own["shape"]]["vocab_size"])
            for _ in range(int(own["repeat"])):
                print(json.dumps({"workload": name, "requests": len(requests), **replica.run(requests)}), flush=True)


if __name__ == "__main__":
    main()
