"""Twenty thousand requests of every kind through one replica: no page leaks, and no memory grows."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.support.submission import header
from tests.support.tiny import tiny_model
from toka.config import Config
from toka.messages import SamplingParams, StageReady, Work
from toka.model import open_model
from workers.manager.__main__ import limits
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler
from workers.stage.build import build

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from workers.stage.cuda.executor import CudaExecutor

REQUESTS, AT_ONCE = 20_000, 600
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.01},
    {"presence_penalty": 0.3, "repetition_penalty": 1.1},
    {"logit_bias": {7: 2.0}, "min_tokens": 3},
    {"logprobs": 3},
]
MEMORY_GROWTH = 1.02


class Soak:
    def __init__(self, model: Path) -> None:
        config = Config(model=str(model), dtype="bfloat16", device="cuda", kv_cache_tokens=16 * 1500, max_seqs=256)
        executor = build(config)
        assert isinstance(executor, CudaExecutor)
        sizes, source = executor.sizes, open_model(config.model)
        ready = StageReady(stage=0, pages=sizes.pages, max_seqs=sizes.max_seqs, max_tokens_per_step=sizes.max_tokens)
        self.executor = executor
        self.scheduler = Scheduler(limits(config, source.config, [ready]), source.config.eos_token_ids)
        self.rng = np.random.default_rng(0)
        self.documents = [self.rng.integers(5, 500, 200).tolist() for _ in range(8)]
        self.left: Counter[bytes] = Counter()
        """Sequences of each request that have not ended."""
        self.submitted = self.cancelled = 0
        self._flying: deque[Sent] = deque()

    def submit(self) -> None:
        rng = self.rng
        prompt = rng.integers(5, 500, int(rng.integers(1, 200))).tolist()
        if rng.random() < 0.4:
            prompt = [*self.documents[int(rng.integers(8))], *prompt[:20]]
        samples = 4 if rng.random() < 0.03 else 1
        params = SamplingParams(
            max_tokens=int(rng.integers(4, 60)), seed=self.submitted, **PARAMS[int(rng.integers(len(PARAMS)))]
        )
        work = Work(
            params=params,
            samples=list(range(samples)),
            output_counts=[0] * samples,
            prompt=np.array(prompt, np.int32),
            outputs=np.empty(0, np.int32),
        )
        self.submitted += 1
        request = self.submitted.to_bytes(16, "big")
        assert self.scheduler.check(work) == ""
        self.scheduler.submit(header(b"f-soak", request, work), work)
        self.left[request] = samples

    def run(self, until: int) -> None:
        """Until `until` requests have been submitted and all have ended."""
        while self.submitted < until or self.left:
            while self.submitted < until and len(self.left) < AT_ONCE:
                self.submit()
            if self.left and self.rng.random() < 0.3:
                self.scheduler.cancel(next(iter(self.left)), [])
                self.cancelled += 1
            self.step()

    def step(self) -> None:
        planned = self.scheduler.plan() if len(self._flying) < 2 else None
        if planned is not None:
            self.executor.submit(planned[0])
            self._flying.append(planned[1])
        elif self._flying:
            self.scheduler.result(self._flying.popleft(), self.executor.collect())
        for message in self.scheduler.outputs(1):
            for request, ended in zip(message.finished, message.finished_sequences):
                self.left[request] -= ended
                if not self.left[request]:
                    del self.left[request]
                    self.scheduler.release(request)


def test_no_page_leaks_and_no_memory_grows(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    soak = Soak(tiny_model(tmp_path / "model", **shape))
    memory = []
    for until in (REQUESTS // 2, REQUESTS):
        soak.run(until)
        state = soak.scheduler.state
        state.pages.check()
        assert not state.pages.held and not state.live and not state.shards
        free, total = torch.cuda.mem_get_info()
        memory.append((psutil.Process().memory_info().rss, total - free))
    assert soak.cancelled > 100
    assert all(after < MEMORY_GROWTH * before for before, after in zip(*memory))
