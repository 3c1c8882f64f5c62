"""Times a stage's steps in this process: `python -m tools.bench.step [rows=16] [context=128] [prefix=0] ...`.

Prints milliseconds of a decode step and the shares of attention, decoder and sampling, and of a prefill
chunk. Every other `key=value` is a setting of Toka, e.g. `model=`, `page_size=32`, `dtype=float32`,
`threads=1`. Contexts spread evenly over half to one and a half times `context`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from workers.stage import threads

OWN = {"rows": 16, "context": 128, "prefix": 0, "temperature": 1, "prefill": 512, "steps": 30}


class Clock:
    """Adds up the seconds that wrapped methods take, by name."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **named)
            finally:
                self.spent[name] += time.perf_counter() - began

        setattr(owner, method, timed)


class Bench:
    def __init__(self, settings: list[str]) -> None:
        from toka.config import load
        from workers.stage.build import build
        from workers.stage.executor import Executor

        config = load(settings, "worker")
        threads.configure(config.threads)
        executor = build(config)
        assert isinstance(executor, Executor), "this is the stage that runs on a CPU"
        self.executor = executor
        self.clock = Clock()
        for owner, method, name in (
            (self.executor.attention, "begin", "attention"),
            (self.executor.attention, "run", "attention"),
            (self.executor.model, "run", "layers"),
            (self.executor.model, "logits", "head"),
            (self.executor.sampler, "sample", "sampling"),
        ):
            self.clock.wrap(owner, method, name)
        self.begin = self.executor.attention.begin

    def time(self, name: str, plans: list[Any]) -> float:
        """Run `plans`; print medians in milliseconds; return that of the whole step."""
        steps: list[dict[str, float]] = []
        for plan in plans:
            self.clock.spent.clear()
            began = time.perf_counter()
            self.executor.execute(plan)
            spent = dict(self.clock.spent) | {"step": time.perf_counter() - began}
            # `run` holds the attention of its layers, all but what `begin` took before it.
            spent["decoder"] = spent["layers"] - spent["attention"]
            steps.append(spent)
        middle = {key: 1e3 * statistics.median(step.get(key, 0.0) for step in steps) for key in steps[0]}
        shares = "  ".join(f"{key} {middle[key]:.2f}" for key in ("attention", "decoder", "head", "sampling"))
        print(
            f"{name}: {middle['step']:.2f} ms  (least {1e3 * min(s['step'] for s in steps):.2f})  {shares}", flush=True
        )
        return middle["step"]


def decode_plans(bench: Bench, rows: int, context: int, prefix: int, temperature: float, steps: int) -> list[Any]:
    from tests.support.plans import Row, Setup, plan

    size = bench.executor.sizes.page_size
    shared, own = prefix // size, -(-(context * 3 // 2) // size) + 1
    table = [(row, i, i) for row in range(rows) for i in range(shared)]
    table += [(row, shared + i, shared + row * own + i) for row in range(rows) for i in range(own)]
    setups = [Setup(slot=row, seed=row, temperature=temperature) for row in range(rows)]
    bench.executor.execute(plan(setups=setups, table=table))
    starts = [shared * size + context // 2 + context * row // rows for row in range(rows)]
    groups = [(range(shared), range(rows))] if shared else []
    return [
        plan(
            rows=[Row(slot=row, start=start, tokens=[-1], samples=[(row, step)]) for row, start in enumerate(starts)],
            groups=groups,
        )
        for step in range(steps)
    ]


def prefill_plans(bench: Bench, tokens: int, steps: int) -> list[Any]:
    from tests.support.plans import Row, Setup, plan

    pages = -(-tokens // bench.executor.sizes.page_size)
    bench.executor.execute(plan(setups=[Setup(slot=0)], table=[(0, i, i) for i in range(pages)]))
    return [plan(rows=[Row(slot=0, start=0, tokens=[1] * tokens, samples=[(0, 0)])]) for _ in range(steps)]


def main() -> None:
    threads.before_torch()
    given = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
    own = OWN | {key: type(OWN[key])(value) for key, value in given.items() if key in OWN}
    bench = Bench([f"{key}={value}" for key, value in given.items() if key not in OWN])
    rows, context, prefix, steps = (own[key] for key in ("rows", "context", "prefix", "steps"))
    if own["prefill"]:
        bench.time(f"prefill of {own['prefill']}", prefill_plans(bench, own["prefill"], max(3, steps // 10)))
    name = f"decode of {rows} rows, context {context}"
    plain = bench.time(name, decode_plans(bench, rows, context, 0, own["temperature"], steps))
    if prefix:
        plans = decode_plans(bench, rows, context, prefix, own["temperature"], steps)
        print(f"ratio {bench.time(f'{name}, behind {prefix} shared', plans) / plain:.2f}")


if __name__ == "__main__":
    main()
