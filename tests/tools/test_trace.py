"""Figures of a trace written by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toka.process import HOME
from tools.bench.trace import report

MANAGER, STAGE = 1, 2


def span(process: int, name: str, began: float, ended: float, category: str = "x", **arguments: Any) -> dict[str, Any]:
    place = {"pid": process, "tid": process, "ts": began, "dur": ended - began}
    return {"ph": "X", "name": name, "cat": category, "args": arguments, **place}


def queued(at: float, plans: int) -> dict[str, Any]:
    return {"ph": "C", "name": "plans queued", "pid": MANAGER, "tid": 0, "ts": at, "args": {"plans": plans}}


def titled(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": process, "args": {"name": name}}


EVENTS = [
    titled(MANAGER, "manager r0"),
    titled(STAGE, "stage r0.0"),
    # Idle for 100 of 1000 us; the second and the third overlap.
    span(STAGE, "step", 1000, 1400, step=1),
    span(STAGE, "step", 1500, 1800, step=2),
    span(STAGE, "step", 1700, 2000, step=3),
    # Kernels leave 300 of 800 us.
    span(STAGE, "gemm", 1100, 1400, "kernel"),
    span(STAGE, "copy", 1700, 1900, "gpu_memcpy"),
    queued(500, 4),
    queued(1200, 1),
    queued(1700, 2),
    queued(5000, 0),
    # The first plan was made before the first step.
    span(MANAGER, "plan", 900, 950),
    span(MANAGER, "send", 950, 960, step=1, hurried=False),
    span(MANAGER, "plan", 1000, 1100),
    span(MANAGER, "send", 1100, 1150, step=2, hurried=True),
    span(MANAGER, "plan", 1500, 1700),
    span(MANAGER, "send", 1700, 1750, step=3, hurried=False),
    span(MANAGER, "wait", 1750, 1950),
]


def test_figures():
    manager, stage = report({"traceEvents": EVENTS})
    assert stage == {
        "process": "stage r0.0",
        "steps": 3,
        "seconds": 0.001,
        "ms_a_step": 0.333,
        "idle": 0.1,
        "kernels": 2,
        "idle_by_kernels": 0.375,
    }
    assert manager == {
        "process": "manager r0",
        "plans": 2,
        "mean_queue": (200 * 4 + 500 * 1 + 300 * 2) / 1000,
        "hurried": 0.5,
        "ms_a_plan": {"plan": 0.15, "send": 0.05, "wait": 0.1},
        "share": {"plan": 0.3, "send": 0.1, "wait": 0.2},
    }


def test_what_was_dropped_is_told():
    dropped = {"ph": "M", "name": "toka_dropped_events", "pid": STAGE, "tid": STAGE, "args": {"dropped": 5}}
    assert report({"traceEvents": [*EVENTS, dropped]})[-1] == {"dropped_events": 5}


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), ("{", "line 1"), ('{"traceEvents": []}', "no step")]
)
def test_a_file_that_is_no_such_trace_ends_in_one_sentence(tmp_path: Path, content: str | None, says: str):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    ran = subprocess.run(
        [sys.executable, "-m", "tools.bench.trace", str(path)], cwd=HOME, capture_output=True, text=True
    )
    assert ran.returncode == 1 and says in ran.stderr and "Traceback" not in ran.stderr


def test_the_command_prints_a_line_for_each_process(tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": EVENTS}))
    ran = subprocess.run(
        [sys.executable, "-m", "tools.bench.trace", str(path)], cwd=HOME, capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["process"] for line in ran.stdout.splitlines()] == ["manager r0", "stage r0.0"]
