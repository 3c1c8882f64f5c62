"""lm-eval against the server gives what it gives on the same weights by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.lm_eval_run import CHOICES, QUESTIONS
from tests.support.server import ROOT, environment, serve
from tools.bench.weights import demo_folder

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval[api,hf]")


def test_all_of_its_ways_to_ask(tmp_path: Path) -> None:
    demo_folder(tmp_path / "made", "float32").rename(tmp_path / "model")
    offline = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    with serve(dtype="float32", max_seqs=16, kv_cache_tokens=8192) as server:
        run = subprocess.run(
            [sys.executable, "-m", "tests.support.lm_eval_run", server.url, str(tmp_path)],
            cwd=ROOT,
            env=environment(offline),
            stdout=subprocess.PIPE,
            text=True,
            timeout=280,
            check=True,
        )
    found = json.loads(run.stdout.splitlines()[-1])
    scored = found["scored"]
    assert len(scored["hf"]) == len(CHOICES) and len({value for each in scored["hf"] for value, _ in each}) == 32
    for way in ("huggingface", "remote", "texts"):
        for document, want in zip(scored[way], scored["hf"], strict=True):
            for (value, greedy), (wanted, was_greedy) in zip(document, want, strict=True):
                assert value == pytest.approx(wanted, abs=1e-3) and greedy == was_greedy
    assert any(greedy for document in scored["hf"] for _, greedy in document)
    assert found["written"]["huggingface"] == found["written"]["remote"] == found["written"]["hf"]
    assert found["chatted"]["chat"] == found["chatted"]["hf"]
    assert len(found["chatted"]["hf"]) == len(QUESTIONS) and found["chatted"]["hf"] != found["written"]["hf"]
