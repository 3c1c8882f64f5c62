"""What a trace says of where the time went: `python -m tools.bench.trace path.json`.

Of each process with steps (a stage): how long its device was idle from the first step to the last, by the steps and,
where kernels were recorded, by the kernels. Of each process with plans (a manager): the mean number of plans queued at
the stage, the share of plans made in a hurry, and what its spans take of a step and of the time.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toka.trace import ON_DEVICE, ON_HOST, QUEUED

Json = dict[str, Any]
Spans = NDArray[np.float64]
"""[spans, 2]: began and ended, in us."""


def spans(events: list[Json]) -> Spans:
    return np.array([(e["ts"], e["ts"] + e["dur"]) for e in events], np.float64).reshape(-1, 2)


def covered(of: Spans) -> float:
    """Time that lies within one of the spans at least."""
    by_start = of[np.argsort(of[:, 0], kind="stable")]
    ends = np.maximum.accumulate(by_start[:, 1])
    before = np.concatenate([[-np.inf], ends[:-1]])
    return float(np.maximum(0, ends - np.maximum(by_start[:, 0], before)).sum())


def idle(of: Spans) -> float:
    """Share of the time from the first span to the last that lies in none."""
    return 1 - covered(of) / float(of[:, 1].max() - of[:, 0].min())


def mean_level(events: list[Json], key: str, began: float, ended: float) -> float:
    """Mean of a counter over the time from `began` to `ended`; before its first event it is 0."""
    times = np.array([-np.inf, *(e["ts"] for e in events), np.inf])
    values = np.array([0.0, *(e["args"][key] for e in events)])
    inside = np.clip(times, began, ended)
    return float((np.diff(inside) * values).sum() / (ended - began))


def device(events: list[Json]) -> Json:
    """Of a stage's events."""
    steps = spans([e for e in events if e["name"] == "step"])
    kernels = spans([e for e in events if e.get("cat") in ON_DEVICE])
    said: Json = {
        "steps": len(steps),
        "seconds": round(float(steps[:, 1].max() - steps[:, 0].min()) / 1e6, 3),
        "ms_a_step": round(float((steps[:, 1] - steps[:, 0]).mean()) / 1e3, 3),
        "idle": round(idle(steps), 4),
    }
    if len(kernels):
        said |= {"kernels": len(kernels), "idle_by_kernels": round(idle(kernels), 4)}
    return said


def manager(events: list[Json], began: float, ended: float) -> Json:
    """Of a manager's events between the first step's begin and the last one's end."""
    inside = [e for e in events if e["ph"] == "X" and began <= e["ts"] < ended and e["name"] != "step"]
    queue = [e for e in events if e["name"] == QUEUED]
    by_name: dict[str, float] = defaultdict(float)
    for event in inside:
        if event.get("cat") not in (*ON_DEVICE, ON_HOST):
            by_name[event["name"]] += event["dur"]
    sends = [e for e in inside if "hurried" in e["args"]]
    plans = len([e for e in inside if e["name"] == "plan"])
    said: Json = {"plans": plans, "mean_queue": round(mean_level(queue, "plans", began, ended), 2)}
    if sends:
        said["hurried"] = round(sum(e["args"]["hurried"] for e in sends) / len(sends), 4)
    said["ms_a_plan"] = {name: round(us / 1e3 / max(plans, 1), 3) for name, us in by_name.items()}
    said["share"] = {name: round(us / (ended - began), 4) for name, us in by_name.items()}
    return said


def report(trace: Json) -> list[Json]:
    """A line for each process; ValueError where there is no step."""
    titles = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    by_process: dict[int, list[Json]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "XC":
            by_process[event["pid"]].append(event)
    steps = spans([e for events in by_process.values() for e in events if e["name"] == "step"])
    if not len(steps):
        raise ValueError("the trace has no step")
    lines: list[Json] = []
    for process in sorted(by_process, key=lambda each: titles[each]):
        events, line = by_process[process], {"process": titles[process]}
        if any(e["name"] == "step" for e in events):
            line |= device(events)
        if any(e["name"] == QUEUED for e in events):
            line |= manager(events, float(steps[:, 0].min()), float(steps[:, 1].max()))
        lines.append(line)
    dropped = [e["args"]["dropped"] for e in trace["traceEvents"] if e["name"] == "toka_dropped_events"]
    return [*lines, *([{"dropped_events": sum(dropped)}] if dropped else [])]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.bench.trace path.json")
    try:
        for line in report(json.loads(Path(sys.argv[1]).read_text())):
            print(json.dumps(line))
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")


if __name__ == "__main__":
    main()
