"""The bench of `toka.LLM` and `toka-batch` from end to end, on the stage without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.tiny import tiny_config
from toka.process import HOME


def test_three_ways_and_their_ratios(tmp_path: Path) -> None:
    settings = [f"model={tiny_config(tmp_path / 'tiny')}", "weights=random", "max_seqs=8", "kv_cache_tokens=8192"]
    command = [sys.executable, "-m", "tools.bench.offline", "stage=null", "workload=sharegpt:8", "clients=1", *settings]
    env = os.environ | {"PYTHONPATH": str(HOME), "TOKA_BENCH_CACHE": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=HOME, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (figures,) = map(json.loads, done.stdout.splitlines())
    straight = figures["straight"]
    assert straight["of_straight"] == 1 and figures["workload"] == "sharegpt:8"
    for way in ("toka-batch", "toka.LLM"):
        own = figures[way]
        assert own["of_straight"] == round(own["output_tokens_per_s"] / straight["output_tokens_per_s"], 3)
        assert own["requests_per_s"] > 0 and own["cpu_seconds"] >= 0
