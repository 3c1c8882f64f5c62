"""Log-probabilities of prompts: those of transformers, from few logits at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.plans import Row, Setup
from tests.support.stage import Driver, executor_for
from tests.support.tiny import VOCAB_SIZE, tiny_model
from toka.messages import ScoredRow, StepResult
from workers.stage.executor import Executor

LENGTHS, LIKELY = [150, 1, 90, 33], [5, 2, 0, VOCAB_SIZE]
"""Of prompts, and how many of the most likely ids each asks for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def executor(folder: Path) -> Executor:
    return executor_for(folder)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def exact(folder: Path, prompt: list[int]) -> Tensor:
    """[ids but the first, vocabulary] log-probabilities."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(network(torch.tensor([prompt])).logits[0, :-1].double(), -1)


def step(driver: Driver, chunks: list[tuple[int, list[int], int, int]], likely: list[int]) -> StepResult:
    """chunks: (slot, prompt, start, end), all of them scored; pages of a slot are those from 30 times its number on."""
    rows, scores, table = [], [], []
    size = driver.executor.sizes.page_size
    for row, (slot, prompt, start, end) in enumerate(chunks):
        rows.append(Row(slot=slot, start=start, tokens=prompt[start:end], samples=[(slot, 0)] * (end == len(prompt))))
        following = prompt[end] if end < len(prompt) else -1
        scores.append(ScoredRow(row=row, likely=likely[slot], following=following))
        table += [(slot, index, 30 * slot + index) for index in range(-(-start // size), -(-end // size))]
    return driver.run(table=table, rows=rows, scores=scores)


def test_chunks_of_several_prompts_in_a_step(folder: Path, executor: Executor) -> None:
    driver = Driver(executor)
    driver.run(setups=[Setup(slot=slot, temperature=0.0) for slot in range(len(LENGTHS))])
    wanted, at, results = prompts(), [0] * len(LENGTHS), [[] for _ in LENGTHS]
    while any(start < length for start, length in zip(at, LENGTHS)):
        chunks = [(slot, wanted[slot], at[slot], min(at[slot] + 40, length)) for slot, length in enumerate(LENGTHS)]
        chunks = [chunk for chunk in chunks if chunk[2] < chunk[3]]
        result = step(driver, chunks, LIKELY)
        assert len(result.tokens) == sum(chunk[3] == len(chunk[1]) for chunk in chunks)
        place = top = 0
        for slot, prompt, start, end in chunks:
            at[slot] = end
            for _ in range(start, min(end, len(prompt) - 1)):
                named = slice(top, top + LIKELY[slot])
                top = named.stop
                values = result.scored_top_values[named]
                results[slot].append((result.scored[place], result.scored_top_ids[named], values))
                place += 1
        assert (place, top, top) == (len(result.scored), len(result.scored_top_ids), len(result.scored_top_values))
    for prompt, likely, found in zip(wanted, LIKELY, results):
        assert len(found) == len(prompt) - 1
        if not found:
            continue
        want = exact(folder, prompt)
        chosen = want.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        np.testing.assert_allclose([each[0] for each in found], chosen, atol=1e-4)
        np.testing.assert_allclose(
            np.array([each[2] for each in found]).reshape(len(found), likely), want.topk(likely).values, atol=1e-4
        )
        for row, (value, ids, values) in enumerate(found):
            np.testing.assert_allclose(values, want[row, torch.from_numpy(ids.copy()).long()], atol=1e-4)
            assert prompt[row + 1] not in ids or value in values, "bit for bit: clients compare them"


def test_never_more_than_a_portion_of_logits(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    logits = executor.model.logits

    def counted(hidden: Tensor) -> Tensor:
        made.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(executor.model, "logits", counted)
    driver = Driver(executor)
    driver.run(setups=[Setup(slot=0)])
    prompt = np.random.default_rng(1).integers(3, VOCAB_SIZE, 1500).tolist()
    result = step(driver, [(0, prompt, 0, 1500)], [1])
    assert len(result.scored) == 1499 and sum(made) == 1500 and max(made) <= executor.sampler.chunk < 100
