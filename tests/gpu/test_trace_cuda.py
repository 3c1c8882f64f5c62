"""The GPU's track of a trace lies where the host's says it must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.stage import generate
from tests.support.tiny import tiny_model
from toka.config import Config
from toka.trace import DEVICE_TRACK, Recorder
from workers.stage.build import build
from workers.stage.profile import Profile

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from workers.stage.cuda.executor import CudaExecutor

WITHIN_US = 500
STEPS = 20


def test_steps_and_kernels_on_the_clock_of_the_host(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    model = tiny_model(tmp_path / "model", **shape)
    executor = build(Config(model=str(model), dtype="bfloat16", device="cuda", kv_cache_tokens=4096, max_seqs=8))
    assert isinstance(executor, CudaExecutor)
    recorder = Recorder("stage", "stage")
    executor.observe(recorder)
    profile = Profile(recorder, 10_000, executor.device)
    generate(executor, [[5, 6, 7], [8, 9]], STEPS)  # type: ignore[arg-type]
    ran = len([event for event in recorder._events if event[2] == "launch"])
    profile.end()
    recorder.write(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = [e for e in events if e["name"] == "step"]
    launches = [e for e in events if e["name"] == "launch"]
    assert len(steps) == ran > STEPS and {e["tid"] for e in steps} == {DEVICE_TRACK}
    for number, (step, launch) in enumerate(zip(steps, launches)):
        assert step["ts"] > launch["ts"] - WITHIN_US, "it begins after it was launched"
        if number + 1 < ran:
            # These steps were waited for one by one.
            assert step["ts"] + step["dur"] < launches[number + 1]["ts"] + WITHIN_US
    # Others, of uploads, run before their step.
    kernels = [e for e in events if e["tid"] > DEVICE_TRACK and e["name"] in ("_rope_store", "_decode", "_draw")]
    assert len(kernels) > STEPS
    outside = [
        e for e in kernels if not any(s["ts"] - WITHIN_US <= e["ts"] <= s["ts"] + s["dur"] + WITHIN_US for s in steps)
    ]
    assert not outside
