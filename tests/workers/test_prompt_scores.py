"""Log-probabilities of prompts by a whole replica equal those of transformers, however they are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engine import Engine
from tests.support.tiny import VOCAB_SIZE, tiny_model

LENGTHS = [1, 2, 15, 16, 17, 40, 64, 65, 100, 129, 150, 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exact(folder: Path) -> Callable[[list[int]], np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def scores(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].numpy()

    return scores


def prompts() -> list[list[int]]:
    """Every second one begins as the one before it."""
    rng = np.random.default_rng(7)
    wanted = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    return [[*wanted[i - 1][:40], *ids] if i % 2 else ids for i, ids in enumerate(wanted)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False, "shared_prefix": False},
        {"max_tokens_per_step": 32},
        {"prefill_chunk": 7, "page_size": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_tokens", [0, 8])
def test_however_it_is_cut(folder, exact, settings, max_tokens):
    engine = Engine(folder, max_seqs=8, kv_cache_tokens=4000, **settings)
    engine.generate(prompts()[::3], 4)
    requests = [engine.submit(ids, max_tokens, n=2, prompt_logprobs=i % 3) for i, ids in enumerate(prompts())]
    engine.finish()
    for request, ids in zip(requests, prompts()):
        assert np.allclose(engine.scores.get(request, []), exact(ids), atol=1e-4)
        assert len(engine.answers[request, 0].tokens) == len(engine.answers[request, 1].tokens) <= max_tokens


def test_across_preemptions(folder, exact):
    engine = Engine(folder, max_seqs=8, kv_cache_tokens=320, max_tokens_per_step=64)
    engine.scheduler.state.lengths.alive = lambda classes, have, steps: np.zeros((len(classes), len(steps)), np.float32)
    requests = [engine.submit(ids, 40, prompt_logprobs=1, ignore_eos=True) for ids in prompts()]
    engine.finish()
    assert engine.scheduler.state.preemptions > 0
    for request, ids in zip(requests, prompts()):
        assert np.allclose(engine.scores.get(request, []), exact(ids), atol=1e-4)
