"""The CUDA stage's logits are as near to float32 as bfloat16 lets them be, whichever way a step is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine import Engine
from tests.support.plans import Row, Setup
from tests.support.stage import Driver, Running
from tests.support.tiny import tiny_model
from toka.config import Config
from toka.messages import StepResult
from toka.model import open_model
from workers.stage import sizes
from workers.stage.build import build
from workers.stage.weights import DTYPES, load_weights

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from workers.stage.cuda.executor import CudaExecutor
from workers.stage.cuda.fused import ready_made

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "qwen2": {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
}
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 4,
}
"""As wide as Llama 3.2 1B."""
CASES = [
    *((family, "bfloat16", {"intermediate_size": 512, **shape}) for family, shape in SHAPES.items()),
    ("llama", "float16", {"intermediate_size": 512, **SHAPES["llama"]}),
    ("llama", "bfloat16", WIDE),
]
SEQUENCES, SHARED, LENGTH, TOP = 20, 80, 160, 10


@dataclass
class Case:
    config: Config
    executor: CudaExecutor
    ids: list[list[int]]
    exact: torch.Tensor
    """[sequences, positions, vocabulary] log-probabilities: transformers in float32, of weights in 16 bits."""
    mean: float
    most: float


@pytest.fixture(scope="module", params=CASES, ids=["llama", "qwen2", "qwen3", "float16", "wide"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    import transformers

    family, narrow, shape = request.param
    folder = tmp_path_factory.mktemp("models") / family
    tiny_model(folder, family, **shape)
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 500, (SEQUENCES, LENGTH))
    ids[:, :SHARED] = ids[0, :SHARED]
    logprobs = []
    for dtype in (torch.float32, DTYPES[narrow]):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[narrow]).to("cuda", dtype)
        with torch.inference_mode():
            logprobs.append(model(torch.from_numpy(ids).cuda()).logits.float().log_softmax(-1))
    exact, rounded = logprobs
    top = exact.topk(TOP)
    off = (rounded.gather(2, top.indices) - top.values).abs()
    config = Config(model=str(folder), dtype=narrow, device="cuda", kv_cache_tokens=16 * 400, max_seqs=SEQUENCES + 2)
    executor = build(config)
    assert isinstance(executor, CudaExecutor)
    yield Case(config, executor, ids.tolist(), exact, off.mean().item(), off.max().item())


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_logits(case: Case, graphs: bool, grouped: bool) -> None:
    executor = case.executor if graphs else without_graphs(case)
    driver = Driver(executor)
    sequences = start(driver, case.ids, [TOP if i % 2 else -1 for i in range(SEQUENCES)])
    force(driver, sequences[:1], [SHARED], False)
    for each in sequences[1:]:
        driver.adopt(each, sequences[0], SHARED // executor.sizes.page_size)
    offs, wrong = [], [0.0]
    for step in range(40):
        counts = [12 + i if step == 0 else 5 if step == 20 and i % 3 else 1 for i in range(SEQUENCES)]
        if step == 0:
            counts[0] = 1
        result = force(driver, sequences, counts, grouped)
        offs.append(compare(case, sequences, result))
        wrong += wrong_by(case, sequences, result)
    off = torch.cat(offs)
    print(f"mean {off.mean() / case.mean:.2f}, most {off.max() / case.most:.2f} of transformers in bfloat16")
    assert off.mean() < case.mean and off.max() < case.most
    assert max(wrong) < 2 * off.max()


def without_graphs(case: Case) -> CudaExecutor:
    source = open_model(case.config.model)
    weights = load_weights(source, dtype=case.config.dtype, device="cuda")
    chosen = sizes.choose(case.config, source.config, weights.dtype, weights.device, None)
    return CudaExecutor(source.config, weights, chosen, ready_made())


def start(driver: Driver, ids: list[list[int]], logprobs: list[int]) -> list[Running]:
    setups = [Setup(slot=i, temperature=0.0, logprobs=count) for i, count in enumerate(logprobs)]
    driver.run(setups=setups)
    return [Running(setup.slot, known, len(known)) for setup, known in zip(setups, ids)]


def force(driver: Driver, sequences: list[Running], counts: list[int], grouped: bool) -> StepResult:
    """A step of the next `counts` known ids; each row samples."""
    rows, table = [], []
    for each, count in zip(sequences, counts):
        table += driver.cover(each, each.cached + count)
        ids = each.known[each.cached : each.cached + count]
        rows.append(Row(slot=each.slot, start=each.cached, tokens=ids, samples=[(each.slot, 0)]))
        each.cached += count
    who = list(range(len(sequences)))
    shared = driver.shared(sequences, rows, who)
    return driver.run(table=table, rows=rows, groups=[(shared, who)] if grouped and shared else [])


def compare(case: Case, sequences: list[Running], result: StepResult) -> torch.Tensor:
    """How far the log-probabilities of the likeliest ids are from float32's, for the rows that have them."""
    asked = [each for each in sequences if each.slot % 2]
    exact = torch.stack([case.exact[each.slot, each.cached - 1] for each in asked])
    ids = torch.from_numpy(result.top_ids).long().view(len(asked), TOP).cuda()
    values = torch.from_numpy(result.top_values).view(len(asked), TOP).cuda()
    return (exact.gather(1, ids) - values).abs().flatten()


def wrong_by(case: Case, sequences: list[Running], result: StepResult) -> list[float]:
    """For rows without log-probabilities whose id is not float32's likeliest: by how much it is less likely."""
    tokens = result.tokens.tolist()
    plain = [(each, token) for each, token in zip(sequences, tokens) if each.slot % 2 == 0]
    exact = [(case.exact[each.slot, each.cached - 1], token) for each, token in plain]
    return [(logprobs.max() - logprobs[token]).item() for logprobs, token in exact]


def test_a_replica_serves_more_than_fits(case: Case) -> None:
    """Prefix cache, samples, preemption and run-ahead over a cache too small for all."""
    engine = Engine(case.config.model, dtype=case.config.dtype, device="cuda", kv_cache_tokens=16 * 60, max_seqs=16)
    prompts = [case.ids[i][: 90 + i] for i in range(12)]
    requests = [engine.submit(p, 60, n=3, temperature=1.0, ignore_eos=True) for p in prompts]
    engine.finish()
    for request in requests:
        samples = [engine.answers[request, sample].tokens for sample in range(3)]
        assert all(len(each) == 60 for each in samples) and samples[0] != samples[1]


@pytest.mark.parametrize("params", [{"top_p": 0.7}, {"top_k": 5, "min_p": 0.01}, {"presence_penalty": 0.5}])
def test_filtered_rows_among_plain_ones(case: Case, params: dict[str, float]) -> None:
    """Rows that need the general sampler change nothing of their neighbours."""
    answers = []
    for extra in ({}, params):
        engine = Engine(case.config.model, dtype=case.config.dtype, device="cuda", kv_cache_tokens=16 * 400, max_seqs=8)
        plain = [engine.submit(case.ids[i][:20], 30, temperature=1.0, ignore_eos=True) for i in range(3)]
        engine.submit(case.ids[5][:20], 30, temperature=1.0, ignore_eos=True, **extra)
        engine.finish()
        answers.append([engine.answers[request, 0].tokens for request in plain])
    assert answers[0] == answers[1]


def test_prompts_of_ten_thousand_tokens(tmp_path: Path) -> None:
    """Each prefilled in chunks, behind a prefix that two share: as near to float32 as transformers is."""
    import transformers

    folder = tiny_model(tmp_path / "model", max_position_embeddings=16_384, intermediate_size=512, **SHAPES["llama"])
    shared = np.random.default_rng(0).integers(5, 500, 9000).tolist()
    prompts = [[*shared, *np.random.default_rng(i).integers(5, 500, 1000).tolist()] for i in (1, 2)]
    engine = Engine(folder, dtype="bfloat16", device="cuda", kv_cache_tokens=32_000, max_tokens_per_step=4096)
    requests = [engine.submit(prompt, 20, logprobs=0, ignore_eos=True) for prompt in prompts]
    engine.finish()
    answers = [engine.answers[request, 0] for request in requests]
    assert answers[1].cached == 9000 // 16 * 16
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda", dtype)
        for prompt, answer in zip(prompts, answers):
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer.tokens]], device="cuda"), logits_to_keep=21).logits
            logprobs = logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs.gather(1, torch.tensor(answer.tokens, device="cuda")[:, None])[:, 0])
    exact, rounded = torch.cat(found[:2]), torch.cat(found[2:])
    off = (torch.tensor([*answers[0].chosen, *answers[1].chosen], device="cuda") - exact).abs()
    assert off.mean() < 1.5 * (rounded - exact).abs().mean()
    assert off.max() < 2 * (rounded - exact).abs().max()
