"""The HTTP bench from end to end, on a tiny model and on the stage without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.tiny import tiny_config
from toka.process import HOME
from tools.bench.serve import write_tokenizer


@pytest.mark.parametrize("stage", ["real", "null"])
def test_a_line_of_json_for_each_workload(tmp_path: Path, stage: str) -> None:
    model = tiny_config(tmp_path / "tiny")
    settings = [f"model={model}", "weights=random", "frontends=2", "max_seqs=8", "kv_cache_tokens=8192", "threads=1"]
    command = [sys.executable, "-m", "tools.bench.serve", f"stage={stage}", "workload=sharegpt:8", "clients=2"]
    env = os.environ | {"PYTHONPATH": str(HOME), "TOKA_BENCH_CACHE": str(tmp_path)}
    done = subprocess.run([*command, *settings], env=env, cwd=HOME, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (figures,) = map(json.loads, done.stdout.splitlines())
    assert (figures["workload"], figures["requests"], figures["frontends"]) == ("sharegpt:8", 8, 2)
    assert figures["output_tokens"] / figures["seconds"] == pytest.approx(figures["output_tokens_per_s"], rel=0.05)
    parts = {"launcher", "broker", "frontend 0", "frontend 1", "manager r0", "matcher r0", "stage r0.0"}
    assert set(figures["cpu_seconds"]) == {f"toka: {part}" for part in parts}


def test_the_tokenizer_has_text_for_every_id(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1000
    assert tokenizer.decode([256, 257, 999]) == " aaaa aaab abcp"
