"""What the manager costs a step, on the CPU alone: `python -m tools.bench.manager [sequences ...]`.

The stage is null: results come back at once, tokens are made up. Decoding only, then with arrivals: every
step some sequences end and as many new ones, of 220 prompt tokens, are admitted and prefilled.
"""

from __future__ import annotations

import sys
import time
from collections import deque

import numpy as np

from toka.messages import Plan, SamplingParams, StepResult, Submit, Work, encode
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler
from workers.manager.state import Limits

PROMPT = 220
OUTPUT = 200
STEPS = 300
DEPTH = 2


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


def submit(to: Scheduler, number: int, max_tokens: int) -> None:
    rng = np.random.default_rng(number)
    prompt = rng.integers(10, 128_000, PROMPT).astype(np.int32)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    work = Work(params=params, samples=[0], output_counts=[0], prompt=prompt, outputs=np.empty(0, np.int32))
    request = number.to_bytes(16, "big")
    to.submit(
        Submit(
            frontend=b"f-bench",
            request=request,
            first_sample=0,
            sequences=1,
            prompt_tokens=PROMPT,
            priority=0,
            page_hashes=b"",
            payload=[],
        ),
        work,
    )


def result(plan: Plan) -> StepResult:
    none = np.empty(0, np.float32)
    tokens = np.ones(len(plan.sample_slots), np.int32)
    return StepResult(
        step=plan.step, busy_us=0, tokens=tokens, chosen=none, top_ids=none.astype(np.int32), top_values=none
    )


def measure(sequences: int, arrivals: bool) -> tuple[float, float, float]:
    """Median and 99th percentile of a step in milliseconds, and the mean number of rows."""
    to = scheduler(sequences)
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 2 * OUTPUT, sequences) if arrivals else np.full(sequences, 2000)
    for number, length in enumerate(lengths.tolist()):
        submit(to, number, int(length))
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
            to.result(sent, result(plan))
            to.outputs(1)
        took = time.perf_counter() - began
        flying.append(planned)
        if to.state.running >= 0.95 * sequences:
            times.append(took)
            rows.append(len(planned[0].row_slots))
        for _ in range(live - to.state.live if arrivals else 0):
            submit(to, number, int(rng.integers(2, 2 * OUTPUT)))
            number += 1
        live = to.state.live
    return float(np.median(times)) * 1e3, float(np.quantile(times, 0.99)) * 1e3, float(np.mean(rows))


def main() -> None:
    sizes = [int(arg) for arg in sys.argv[1:]] or [256, 1024, 4096, 8192]
    print("| sequences | load | rows a step | median ms | p99 ms |\n|---|---|---|---|---|")
    for size in sizes:
        for arrivals in (False, True):
            median, tail, rows = measure(size, arrivals)
            load = "with arrivals" if arrivals else "decode only"
            print(f"| {size} | {load} | {rows:.0f} | {median:.2f} | {tail:.2f} |")


if __name__ == "__main__":
    main()
