"""What the manager costs, on the CPU alone, with a null stage: results come back at once, tokens are made up.

`python -m tools.bench.manager [sequences ...]`: milliseconds a step. Decoding only, then with arrivals: every
step some sequences end and as many new ones, of 220 prompt tokens, are admitted and prefilled.

`python -m tools.bench.manager workload=longdoc [count=0] [max_seqs=4096] [kv_cache_tokens=2000000] ...`: a workload of
`tools.bench.workloads`, all requests at once: seconds by what they went into, and what the plans were like. Tokens are
uniform over the vocabulary; `modelled_tokens_per_s` takes a step to last STEP_MS, plus its rows and its prefill.
One with stop ids runs twice: the second time the lengths are given.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toka.messages import Plan, SamplingParams, StepResult, Submit, Work, encode
from tools.bench.workloads import VOCABULARY, WORKLOADS, Request
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler
from workers.manager.state import Limits

PROMPT = 220
OUTPUT = 200
STEPS = 300
DEPTH = 2
SETTINGS = {"count": 0, "max_seqs": 4096, "kv_cache_tokens": 2_000_000, "max_tokens_per_step": 8192, "seed": 0}
STEP_MS, ROW_MS, PREFILL_MS = 5.0, 0.0035, 0.006
"""A step of a model of a billion weights on one H200: itself, a row, a token of prefill."""


def scheduler(sequences: int) -> Scheduler:
    limits = Limits(
        pages=sequences * 150,
        page_size=16,
        max_seqs=sequences,
        max_tokens_per_step=max(8192, 2 * sequences),
        context_length=4096,
        vocab_size=128_256,
    )
    return Scheduler(limits, [0])


def message(number: int, request: Request) -> tuple[Submit, Work]:
    params = SamplingParams(
        max_tokens=request.outputs,
        temperature=1.0,
        seed=number,
        stop_token_ids=list(request.stop_ids),
        ignore_eos=not request.stop_ids,
    )
    prompt, none = np.array(request.prompt, np.int32), np.empty(0, np.int32)
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
    return header, Work(params=params, samples=[0], output_counts=[0], prompt=prompt, outputs=none)


def result(plan: Plan, tokens: NDArray[np.int32]) -> StepResult:
    none = np.empty(0, np.float32)
    return StepResult(
        step=plan.step, busy_us=0, tokens=tokens, chosen=none, top_ids=none.astype(np.int32), top_values=none
    )


def measure(sequences: int, arrivals: bool) -> tuple[float, float, float]:
    """Median and 99th percentile of a step in milliseconds, and the mean number of rows."""
    to = scheduler(sequences)
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 2 * OUTPUT, sequences) if arrivals else np.full(sequences, 2000)
    for number, length in enumerate(lengths.tolist()):
        to.submit(*message(number, _request(rng, int(length))))
    flying: deque[tuple[Plan, Sent]] = deque()
    times: list[float] = []
    rows: list[int] = []
    live = number = sequences
    while len(times) < STEPS:
        began = time.perf_counter()
        planned = to.plan()
        assert planned is not None
        encode(planned[0])
        if len(flying) == DEPTH:
            plan, sent = flying.popleft()
            to.result(sent, result(plan, np.ones(len(plan.sample_slots), np.int32)))
            to.outputs(1)
        took = time.perf_counter() - began
        flying.append(planned)
        if to.state.running >= 0.95 * sequences:
            times.append(took)
            rows.append(len(planned[0].row_slots))
        for _ in range(live - to.state.live if arrivals else 0):
            to.submit(*message(number, _request(rng, int(rng.integers(2, 2 * OUTPUT)))))
            number += 1
        live = to.state.live
    return float(np.median(times)) * 1e3, float(np.quantile(times, 0.99)) * 1e3, float(np.mean(rows))


def _request(rng: np.random.Generator, outputs: int) -> Request:
    return Request(rng.integers(10, 128_000, PROMPT).tolist(), outputs)


class Run:
    """`requests` through a scheduler and a null stage, to their ends."""

    def __init__(self, requests: list[Request], settings: dict[str, int]) -> None:
        limits = Limits(
            pages=settings["kv_cache_tokens"] // 16,
            page_size=16,
            max_seqs=settings["max_seqs"],
            max_tokens_per_step=settings["max_tokens_per_step"],
            context_length=131_072,
            vocab_size=VOCABULARY,
        )
        self.scheduler = Scheduler(limits, [])
        self.spent = dict.fromkeys(("submit", "plan", "encode", "result"), 0.0)
        self.longest_ms = 0.0
        """The longest plan."""
        self.steps = self.rows = self.computed = 0
        self.pages: list[int] = []
        """Pages held, by step, ..."""
        self.waited = 0
        """... and the steps until nothing waited any more."""
        self.modelled_ms = 0.0
        self._rng = np.random.default_rng(settings["seed"])
        messages = [message(number, request) for number, request in enumerate(requests)]
        clock = time.perf_counter()
        for each in messages:
            self.scheduler.submit(*each)
        self.spent["submit"] = time.perf_counter() - clock
        self._serve()

    def _serve(self) -> None:
        to, flying = self.scheduler, deque[tuple[Plan, Sent]]()
        while to.state.live or flying:
            clock = time.perf_counter()
            planned = to.plan() if len(flying) < DEPTH else None
            took = time.perf_counter() - clock
            self.spent["plan"] += took
            self.longest_ms = max(self.longest_ms, took * 1e3)
            if planned is not None:
                flying.append(planned)
                self._note(planned[0])
            if planned is None or len(flying) == DEPTH:
                plan, sent = flying.popleft()
                tokens = self._rng.integers(0, VOCABULARY, len(plan.sample_slots), np.int32)
                clock = time.perf_counter()
                to.result(sent, result(plan, tokens))
                to.outputs(1)
                self.spent["result"] += time.perf_counter() - clock

    def _note(self, plan: Plan) -> None:
        clock = time.perf_counter()
        encode(plan)
        self.spent["encode"] += time.perf_counter() - clock
        self.steps += 1
        self.rows += len(plan.row_slots)
        self.computed += len(plan.tokens)
        self.pages.append(self.scheduler.state.pages.held)
        if len(self.scheduler.state.waiting):
            self.waited = self.steps
        prefill = int((plan.tokens >= 0).sum())
        self.modelled_ms += STEP_MS + ROW_MS * len(plan.row_slots) + PREFILL_MS * prefill

    @property
    def tokens_per_s(self) -> float:
        return self.scheduler.accounting.tokens / self.modelled_ms * 1e3

    def report(self) -> dict[str, Any]:
        state, accounting = self.scheduler.state, self.scheduler.accounting
        return {
            "seconds": {name: round(spent, 3) for name, spent in self.spent.items()},
            "longest_plan_ms": round(self.longest_ms, 1),
            "steps": self.steps,
            "rows_a_step": round(self.rows / self.steps),
            "pages_used": round(float(np.mean(self.pages)) / state.limits.pages, 3),
            "pages_used_while_some_wait": round(float(np.mean(self.pages[: self.waited or 1])) / state.limits.pages, 3),
            "preemptions": state.preemptions,
            "computed_twice": round(state.recomputed / self.computed, 4),
            "discarded": round(accounting.discarded / accounting.tokens, 4),
            "modelled_tokens_per_s": round(self.tokens_per_s),
        }


def lengths(to: Scheduler) -> list[int]:
    """Output tokens of each request that has run, in their order."""
    return [len(s.outputs) for shards in to.state.shards.values() for s in shards[0].sequences.values()]


def run(workload: str, settings: dict[str, int]) -> None:
    requests = WORKLOADS[workload](**({"count": settings["count"]} if settings["count"] else {}))
    first = Run(requests, settings)
    print(json.dumps({"workload": workload, **first.report()}))
    if any(request.stop_ids for request in requests):
        given = Run([Request(r.prompt, length) for r, length in zip(requests, lengths(first.scheduler))], settings)
        print(json.dumps({"workload": f"{workload}, lengths given", **given.report()}))
        print(json.dumps({"ratio": round(first.tokens_per_s / given.tokens_per_s, 3)}))


def table(sizes: list[int]) -> None:
    print("| sequences | load | rows a step | median ms | p99 ms |\n|---|---|---|---|---|")
    for size in sizes:
        for arrivals in (False, True):
            median, tail, rows = measure(size, arrivals)
            load = "with arrivals" if arrivals else "decode only"
            print(f"| {size} | {load} | {rows:.0f} | {median:.2f} | {tail:.2f} |")


def main() -> None:
    given = dict(arg.split("=", 1) for arg in sys.argv[1:] if "=" in arg)
    if workloads := given.pop("workload", ""):
        for workload in workloads.split(","):
            run(workload, SETTINGS | {key: int(value) for key, value in given.items()})
    else:
        table([int(arg) for arg in sys.argv[1:]] or [256, 1024, 4096, 8192])


if __name__ == "__main__":
    main()
