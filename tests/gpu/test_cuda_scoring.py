"""Log-probabilities of prompts on a GPU: as near to float32 as transformers in bfloat16 is, without waiting for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engine import Engine
from tests.support.plans import Row, Setup, plan
from tests.support.tiny import tiny_model
from toka.messages import Plan, ScoredRow

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from workers.stage.cuda.executor import CudaExecutor

SHAPE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
LENGTHS = [1, 2, 40, 150, 700, 3000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), intermediate_size=512, **SHAPE)


def engine(folder: Path) -> Engine:
    settings = {"kv_cache_tokens": 16_000, "max_seqs": 32, "max_tokens_per_step": 1024}
    return Engine(folder, dtype="bfloat16", device="cuda", **settings)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 500, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("max_tokens", [0, 12])
def test_prompts_in_chunks_beside_others(folder: Path, max_tokens: int) -> None:
    import transformers

    running = engine(folder)
    assert isinstance(running.executor, CudaExecutor)
    for ids in prompts():
        running.submit(ids, 20, temperature=1.0, logprobs=3)
    asked = [running.submit(ids, max_tokens, n=2, prompt_logprobs=i * 7) for i, ids in enumerate(prompts())]
    running.finish()
    found = torch.tensor([value for request in asked for value in running.scores.get(request, [])])
    assert len(found) == sum(LENGTHS) - len(LENGTHS)
    wanted = []
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda", dtype)
        scores = []
        for ids in prompts():
            with torch.inference_mode():
                logprobs = model(torch.tensor([ids], device="cuda")).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(1, torch.tensor(ids[1:], device="cuda", dtype=torch.int64)[:, None])[:, 0])
        wanted.append(torch.cat(scores).cpu())
    exact, rounded = wanted
    off = (found - exact).abs()
    assert off.mean() < 1.5 * (rounded - exact).abs().mean() and off.max() < 2 * (rounded - exact).abs().max()


def scored(step: int, likely: int) -> Plan:
    row = Row(slot=0, start=0, tokens=list(range(5, 405)))
    table = [(0, index, index) for index in range(25)] if step == 0 else []
    scores = [ScoredRow(row=0, likely=likely, following=9)]
    return plan(step=step, setups=[Setup(slot=0)], table=table, rows=[row], scores=scores)


def test_scoring_neither_waits_nor_grows(folder: Path) -> None:
    """And gives the likeliest ids of graphs of every width alike."""
    executor = engine(folder).executor
    assert isinstance(executor, CudaExecutor)
    narrow, wide, alone = (executor.execute(scored(step, likely)) for step, likely in enumerate((5, 200, 0)))
    assert (wide.scored == narrow.scored).all() and (wide.scored == alone.scored).all()
    assert (wide.scored_top_ids.reshape(400, 200)[:, :5].reshape(-1) == narrow.scored_top_ids).all()
    assert (wide.scored_top_values.reshape(400, 200)[:, :5].reshape(-1) == narrow.scored_top_values).all()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 23):
            executor.submit(scored(step, 5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(20):
        assert (executor.collect().scored == narrow.scored).all()
    assert torch.cuda.memory_reserved() - before < 8 << 20
