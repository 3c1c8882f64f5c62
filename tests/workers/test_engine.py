"""Greedy tokens of the whole replica equal those of transformers on the same weights, however they are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine import Engine
from tests.support.tiny import VOCAB_SIZE, tiny_model
from toka.model import open_model
from tools.bench.weights import demo_folder

OUTPUT = 24
LENGTHS = [1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 21, 31, 32, 33, 40, 48, 55, 64, 65, 70, 81, 90, 96, 97, 110, 120, 128, 129,
           140, 150, 160, 200]  # fmt: skip
TEXTS = [
    "The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at", "The three laws of",
    "My favourite colour", "To make bread you need", "1 2 3 4 5", "Dear Sir or Madam,", "Photosynthesis is",
]  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama3 rope, untied, biases": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama, tied, explicit head_dim": {"family": "llama", "tie_word_embeddings": True, "head_dim": 32},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
}  # fmt: skip


def prompts(count: int = 32) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS[:count]]


def reference(folder: Path, wanted: list[list[int]], output: int = OUTPUT) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=output, do_sample=False,
            )[0, len(prompt) :].tolist()
            for prompt in wanted
        ]  # fmt: skip


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """A model's folder and the reference for `prompts()`, made once each."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(name: str) -> tuple[Path, list[list[int]]]:
        if name not in made:
            folder = tiny_model(tmp_path_factory.mktemp("model"), **MODELS[name])
            made[name] = folder, reference(folder, prompts())
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_32_and_each_alone(known, name):
    folder, expected = known(name)
    engine = Engine(folder, max_seqs=32, kv_cache_tokens=16384)
    assert engine.generate(prompts(), OUTPUT) == expected
    alone = [engine.generate([prompt], OUTPUT)[0] for prompt in prompts()[::6]]
    assert alone == expected[::6]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_chunked_prefill(known, chunk, prefix_cache):
    folder, expected = known("llama")
    engine = Engine(folder, max_seqs=32, kv_cache_tokens=16384, prefill_chunk=chunk, prefix_cache=prefix_cache)
    assert engine.generate(prompts(), OUTPUT) == expected


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_sizes(known, page_size):
    folder, expected = known("qwen3")
    engine = Engine(folder, max_seqs=32, kv_cache_tokens=16000, page_size=page_size)
    assert engine.generate(prompts(12), OUTPUT) == expected[:12]


def expect_no_output(engine: Engine) -> None:
    """A predictor by which everything stops at once admits too many."""
    engine.scheduler.state.lengths.alive = lambda classes, have, steps: np.zeros((len(classes), len(steps)), np.float32)


def test_across_a_preemption(known):
    folder, expected = known("llama")
    engine = Engine(folder, max_seqs=8, kv_cache_tokens=320, max_tokens_per_step=64)
    expect_no_output(engine)
    assert engine.generate(prompts(16), OUTPUT) == expected[:16]
    assert engine.scheduler.state.preemptions > 0


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_a_shared_prefix(known, shared_prefix, tmp_path):
    folder, _ = known("llama")
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, VOCAB_SIZE, 300).tolist()
    wanted = [[*prefix, *rng.integers(3, VOCAB_SIZE, 1 + i).tolist()] for i in range(8)]
    engine = Engine(folder, kv_cache_tokens=16384, shared_prefix=shared_prefix)
    assert engine.generate(wanted, OUTPUT) == reference(folder, wanted)
    assert any(len(plan.group_row_counts) for plan in engine.plans) == shared_prefix
    assert sum(len(plan.tokens) for plan in engine.plans) < 300 + 8 * (20 + OUTPUT), "the prefix is computed once"


def test_many_samples_of_one_prompt(known):
    folder, expected = known("qwen2")
    engine = Engine(folder, kv_cache_tokens=16384, max_seqs=8)
    request = engine.submit(prompts()[20], OUTPUT, n=12)
    engine.finish()
    assert [engine.answers[request, s].tokens for s in range(12)] == [expected[20]] * 12


def test_sampled_tokens_do_not_depend_on_the_batch(known):
    folder, _ = known("llama")
    hot = {"temperature": 1.3, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.1}
    alone = Engine(folder, kv_cache_tokens=16384).generate([prompts()[9]], OUTPUT, **hot)
    engine = Engine(folder, kv_cache_tokens=16384, max_tokens_per_step=48, max_seqs=16)
    others = [engine.submit(p, 30, temperature=0.8) for p in prompts(9)]
    request = engine.submit(prompts()[9], OUTPUT, **hot)
    engine.finish()
    assert engine.answers[request, 0].tokens == alone[0]
    assert len({tuple(engine.answers[r, 0].tokens) for r in others}) > 1


def test_penalties_survive_a_preemption(known):
    folder, _ = known("llama")
    params = {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    wanted = prompts(12)[4:]
    calm = Engine(folder, max_seqs=8, kv_cache_tokens=16384).generate(wanted, OUTPUT, **params)
    engine = Engine(folder, max_seqs=8, kv_cache_tokens=160, max_tokens_per_step=64)
    expect_no_output(engine)
    assert engine.generate(wanted, OUTPUT, **params) == calm
    assert engine.scheduler.state.preemptions > 0


def test_logprobs(known):
    from transformers import AutoModelForCausalLM

    folder, expected = known("llama")
    engine = Engine(folder, kv_cache_tokens=16384)
    requests = [engine.submit(p, OUTPUT, logprobs=3) for p in prompts(8)]
    engine.finish()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, request, tokens in zip(prompts(8), requests, expected):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert np.allclose(engine.answers[request, 0].chosen, chosen.numpy(), atol=1e-4)


def test_bfloat16_runs_in_bfloat16(known):
    folder, expected = known("llama")
    engine = Engine(folder, kv_cache_tokens=4096, dtype="bfloat16")
    tokens = engine.generate(prompts(4), OUTPUT)
    same = np.mean([a == b for got, want in zip(tokens, expected) for a, b in zip(got, want)])
    assert same > 0.1, "near the float32 tokens for a while, though not for ever"


def test_the_demo_model_equals_transformers(tmp_path):
    """Ten prompts, alone and in a batch, in float32."""
    folder = demo_folder(tmp_path)
    engine = Engine(folder, kv_cache_tokens=8192, dtype="float32", max_seqs=32)
    tokenizer = open_model(str(folder)).tokenizer()
    wanted = [tokenizer.encode(text).ids for text in TEXTS]
    expected = reference(folder, wanted, 16)
    longer = [ids * 3 for ids in wanted] + [ids * 5 for ids in wanted] + wanted[:2]
    assert engine.generate([*wanted, *longer], 16)[:10] == expected
    assert [engine.generate([ids], 16)[0] for ids in wanted] == expected
