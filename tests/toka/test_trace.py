"""The recorder of a process, and the one timeline that `toka trace=...` makes of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import ROOT, environment, running, serve
from tests.support.tiny import tiny_config
from toka.trace import DEVICE_TRACK, OFF, Recorder, gathered
from tools.bench.trace import report

WITHIN_US = 5000
"""Of a moment that two processes stamp one after the other."""
LEAVES = """
import sys, time
from toka.trace import Recorder
recorder = Recorder("other", "another process")
recorder.count("moment", ns=time.time_ns())
recorder.leave(sys.argv[1])
"""


def load(path: Path) -> tuple[int, list[dict[str, Any]]]:
    trace = json.loads(path.read_text())
    return trace["baseTimeNanoseconds"], trace["traceEvents"]


def test_spans_and_counters_have_their_track_and_their_time(tmp_path: Path):
    recorder = Recorder("stage", "stage r0.0")
    recorder.name_track("loop")
    before = time.time_ns()
    with recorder.span("outer", step=7):
        with recorder.span("inner"):
            time.sleep(0.01)
        recorder.count("queue", plans=3)
    now = time.perf_counter_ns()
    recorder.add("step", now, now + 2_000_000, track=DEVICE_TRACK, category="gpu")
    recorder.write(tmp_path / "t.json")
    base, events = load(tmp_path / "t.json")
    by_name = {event["name"]: event for event in events}
    outer, inner, queue, step = (by_name[name] for name in ("outer", "inner", "queue", "step"))
    assert (outer["ph"], outer["cat"], outer["args"]) == ("X", "stage", {"step": 7})
    assert outer["ts"] == 0 and abs(base - before) < WITHIN_US * 1000
    assert inner["dur"] >= 10_000 and outer["dur"] >= inner["dur"] and outer["tid"] == inner["tid"]
    assert (queue["ph"], queue["args"]) == ("C", {"plans": 3}) and queue["ts"] >= inner["ts"] + inner["dur"]
    assert (step["dur"], step["tid"], step["cat"]) == (2000, DEVICE_TRACK, "gpu")
    titles = [(e["name"], e["args"].get("name")) for e in events if e["ph"] == "M"]
    assert ("process_name", "stage r0.0") in titles and ("thread_name", "loop") in titles


def test_a_recorder_that_is_off_keeps_and_leaves_nothing(tmp_path: Path):
    with OFF.span("anything", step=1):
        OFF.count("queue", plans=3)
    OFF.add("step", 0, 1)
    OFF.leave(str(tmp_path))
    assert not OFF._events and not OFF.dropped and not list(tmp_path.iterdir())


def test_memory_is_bounded_and_what_was_dropped_is_told(tmp_path: Path):
    recorder = Recorder("stage", "stage", most=10)
    for number in range(25):
        recorder.count("queue", plans=number)
    recorder.write(tmp_path / "t.json")
    _, events = load(tmp_path / "t.json")
    assert [e["args"]["plans"] for e in events if e["ph"] == "C"] == list(range(10)), "the first ones"
    assert [e["args"] for e in events if e["name"] == "toka_dropped_events"] == [{"dropped": 15}]


def test_parts_of_processes_are_gathered_on_one_clock(tmp_path: Path):
    path, folder = tmp_path / "t.json", tmp_path / "run"
    (folder / "r0").mkdir(parents=True)
    (folder / "r0" / "1.trace").write_text("of a start that was killed")
    with gathered(str(path), folder):
        here = Recorder("here", "this process")
        here.count("moment", ns=time.time_ns())
        subprocess.run([sys.executable, "-c", LEAVES, str(folder / "r0")], env=environment(), cwd=ROOT, check=True)
        here.leave(str(folder))
    base, events = load(path)
    moments = [event for event in events if event["name"] == "moment"]
    assert len({event["pid"] for event in moments}) == 2
    assert min(event["ts"] for event in moments) == 0
    for event in moments:
        assert abs(base + event["ts"] * 1000 - event["args"]["ns"]) < WITHIN_US * 1000
    assert not list(folder.rglob("*.trace"))


def test_without_a_path_nothing_is_gathered(tmp_path: Path):
    with gathered("", tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("at", "why"), [("no/such/t.json", "No such file"), ("", "Is a directory")])
@pytest.mark.parametrize("module", ["toka", "workers"])
def test_a_path_that_cannot_be_written_ends_the_start(tmp_path: Path, at: str, why: str, module: str):
    given = {"broker": f"ipc://{tmp_path}/b"} if module == "workers" else {}
    with running(module, trace=tmp_path / at, **given) as process:
        assert process.wait(20) == 1
        assert f"trace: {tmp_path / at}: {why}" in process.output and "Traceback" not in process.output


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a server on the CPU wrote that answered 3 requests of 8 tokens and looked at the operators of 5 steps."""
    folder = tmp_path_factory.mktemp("traced")
    model, path = tiny_config(folder / "model"), folder / "trace.json"
    small = {"weights": "random", "max_seqs": 4, "kv_cache_tokens": 2048, "threads": 1}
    with serve(model=model, trace=path, trace_kernels=5, **small) as server:
        for seed in range(3):
            body = {"prompt": "The sea", "max_tokens": 8, "ignore_eos": True, "seed": seed}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        assert server.stop() == 0, server.output
        assert "trace written" in server.output
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_a_server_writes_the_timeline_of_its_replica(traced: dict[str, Any]):
    events = traced["traceEvents"]
    titles = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(titles) == {"manager r0", "stage r0.0"}
    of = {
        title: {e["name"] for e in events if e["pid"] == pid and e.get("cat") != "cpu_op" and e["ph"] != "M"}
        for title, pid in titles.items()
    }
    spans = {"wait", "results", "messages", "account", "admit", "plan", "send", "flush"}
    assert of["manager r0"] == spans | {"plans queued", "sequences", "pages", "pacing", "postponed"}
    assert of["stage r0.0"] == {"step", "stop the profiler"}
    sent = {e["args"]["step"]: e for e in events if e["name"] == "send" and "step" in e["args"]}
    steps = {e["args"]["step"]: e for e in events if e["name"] == "step"}
    assert len(steps) >= 3 * 8 and sent.keys() == steps.keys()
    for number, step in steps.items():
        assert sent[number]["ts"] < step["ts"], "on one clock a step comes after its plan"


def test_operators_lie_within_the_steps_that_were_looked_at(traced: dict[str, Any]):
    events = traced["traceEvents"]
    steps = sorted((e for e in events if e["name"] == "step"), key=lambda e: e["ts"])
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    looked_at = set()
    for each in operators:
        inside = [s for s in steps if s["ts"] <= each["ts"] and each["ts"] + each["dur"] <= s["ts"] + s["dur"]]
        assert len(inside) == 1 and inside[0]["tid"] == each["tid"]
        looked_at.add(inside[0]["args"]["step"])
    assert looked_at == {s["args"]["step"] for s in steps[:5]}


def test_the_report_of_it_adds_up(traced: dict[str, Any]):
    lines = {line["process"]: line for line in report(traced)}
    stage, manager = lines["stage r0.0"], lines["manager r0"]
    assert stage["steps"] >= 24 and 0 < stage["idle"] < 1
    assert 0 < manager["mean_queue"] <= 2 and 0 <= manager["hurried"] <= 1
    assert 0.9 < sum(manager["share"].values()) < 1.1, "the manager's spans cover its time"
