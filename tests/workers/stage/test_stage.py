"""An executor gives the tokens that transformers gives, however plans cut, batch, share and move sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.plans import Row, Setup
from tests.support.stage import Driver, executor_for, generate
from tests.support.tiny import VOCAB_SIZE, tiny_model
from workers.stage.executor import Executor
from workers.stage.warm_up import warm_up

OPTIONS = {
    "llama": {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"num_key_value_heads": 1},
}
NEW = 12


@pytest.fixture(scope="module", params=list(OPTIONS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), request.param, **OPTIONS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def executor(llama: Path) -> Executor:
    return executor_for(llama)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


def reference(model: Path, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy outputs of transformers, one prompt at a time, and their log-probabilities."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    outputs, logprobs = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(tokens):
                ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
            scores = torch.log_softmax(network(torch.tensor([ids])).logits[0].double(), -1)
            places = range(len(prompt) - 1, len(ids) - 1)
            outputs.append(ids[len(prompt) :])
            logprobs.append([float(scores[place, ids[place + 1]]) for place in places])
    return outputs, logprobs


@pytest.mark.parametrize("page_size", [8, 32])
def test_greedy_tokens_equal_transformers(model: Path, page_size: int) -> None:
    """For chunks of 1, 7 and all, alone and in a batch, all at once and one after the other."""
    prompts = prompts_of([1, 2, 7, 8, 9, 31, 64, 100])
    want, _ = reference(model, prompts, NEW)
    executor = executor_for(model, page_size=page_size)
    for chunk in (1, 7, 1 << 20):
        for stagger in (0, 3):
            assert generate(executor, prompts, NEW, chunk=chunk, stagger=stagger) == want, (chunk, stagger)
    assert [generate(executor, [prompt], NEW)[0] for prompt in prompts] == want


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_groups_change_no_token(llama: Path, executor: Executor, chunk: int) -> None:
    """Two prefixes, shared by three and by four sequences, and one that shares nothing; some still prefill."""
    prefixes = prompts_of([40, 17], seed=1)
    tails = prompts_of([1, 4, 20, 3, 6, 11, 2], seed=2)
    prompts = [prefixes[i >= 3] + tail for i, tail in enumerate(tails)] + prompts_of([25], seed=3)
    want, _ = reference(llama, prompts, NEW)
    for grouped in (False, True):
        driver = Driver(executor)
        running = [driver.start(p, Setup(slot=i, temperature=0.0)) for i, p in enumerate(prompts)]
        driver.advance([running[0], running[3]], 1 << 20)
        for follower, leader, pages in ((1, 0, 5), (2, 0, 5), (4, 3, 2), (5, 3, 2), (6, 3, 2)):
            driver.adopt(running[follower], running[leader], pages)
        while any(len(each.outputs) < NEW for each in running):
            rows = [each for each in running if len(each.outputs) < NEW]
            first = [i for i, each in enumerate(rows) if each.slot < 3]
            second = [i for i, each in enumerate(rows) if 3 <= each.slot < 7]
            driver.advance(rows, chunk, [g for g in (first, second) if len(g) > 1] if grouped else ())
        assert [each.outputs for each in running] == want


def test_a_preempted_sequence_goes_on_in_another_slot(llama: Path, executor: Executor) -> None:
    prompts = prompts_of([20, 30, 5], seed=4)
    want, _ = reference(llama, prompts, NEW)
    driver = Driver(executor)
    running = [driver.start(p, Setup(slot=i, temperature=0.0)) for i, p in enumerate(prompts)]
    for _ in range(5):
        driver.advance(running, 1 << 20)
    # Its slot goes to another sequence, its pages go to whoever is next.
    driver.free += running[1].pages
    outputs = running[1].outputs
    other = driver.start(prompts[0], Setup(slot=1, temperature=0.0))
    moved = driver.start(prompts[1], Setup(slot=7, temperature=0.0), outputs)
    running[1] = moved
    while any(len(each.outputs) < NEW for each in [*running, other]):
        driver.advance([each for each in [*running, other] if len(each.outputs) < NEW], 9)
    assert [each.outputs for each in running] == want
    assert other.outputs == want[0]


def test_samples_of_a_prompt_share_its_row_and_copy_its_partial_page(llama: Path, executor: Executor) -> None:
    """Slots 0..2 draw their first token from one row; 1 and 2 go on with the full pages and a copy of the last."""
    prompt = prompts_of([21], seed=5)[0]
    alone = [
        generate(executor, [prompt], NEW, setups=[Setup(slot=0, seed=77, sample=sample)])[0] for sample in range(3)
    ]
    assert len({tuple(each) for each in alone}) == 3
    driver = Driver(executor)
    running = [driver.start(prompt, Setup(slot=i, seed=77, sample=i)) for i in range(3)]
    table = driver.cover(running[0], 21)
    result = driver.run(
        table=table, rows=[Row(slot=0, start=0, tokens=prompt, samples=[(slot, 0) for slot in range(3)])]
    )
    copies, table = [], []
    for each, token in zip(running, result.tokens.tolist()):
        each.known.append(token)
        each.logprobs.append(0.0)
        each.cached = 21
        if each.slot:
            each.pages = [*running[0].pages[:2], driver.free.pop()]
            copies.append((running[0].pages[2], each.pages[2]))
            table += [(each.slot, i, page) for i, page in enumerate(each.pages)]
    driver.run(table=table, copies=copies)
    while len(running[0].outputs) < NEW:
        driver.advance(running, 1, groups=[(0, 1, 2)])
    assert [each.outputs for each in running] == alone


def test_sampled_tokens_do_not_depend_on_the_batch(executor: Executor) -> None:
    prompts = prompts_of([3, 14, 40, 9, 27, 1], seed=6)
    setups = [Setup(slot=i, seed=100 + i, temperature=0.8, top_p=0.9 if i % 2 else 1.0) for i in range(6)]
    together = generate(executor, prompts, NEW, setups=setups, stagger=2, chunk=10)
    alone = [generate(executor, [p], NEW, setups=[s])[0] for p, s in zip(prompts, setups)]
    assert together == alone
    other = generate(executor, [prompts[0]], NEW, setups=[Setup(slot=0, seed=101, temperature=0.8)])[0]
    assert other != together[0]


def test_logprobs_equal_transformers(model: Path) -> None:
    prompts = prompts_of([5, 33], seed=7)
    want, logprobs = reference(model, prompts, NEW)
    driver = Driver(executor_for(model))
    running = [driver.start(p, Setup(slot=i, temperature=0.0, logprobs=0)) for i, p in enumerate(prompts)]
    while len(running[0].outputs) < NEW:
        driver.advance(running, 1 << 20)
    assert [each.outputs for each in running] == want
    np.testing.assert_allclose([each.logprobs for each in running], logprobs, atol=1e-4)


def test_bfloat16_stays_close_to_float32(llama: Path) -> None:
    """Teacher forcing: of the tokens chosen in bfloat16, each is nearly the likeliest in float32."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    prompts = prompts_of([10, 60], seed=8)
    for prompt, outputs in zip(prompts, generate(executor_for(llama, dtype="bfloat16"), prompts, NEW)):
        with torch.inference_mode():
            logits = network(torch.tensor([prompt + outputs])).logits[0, len(prompt) - 1 : -1]
        short = logits.amax(1) - logits[torch.arange(NEW), torch.tensor(outputs)]
        assert float(short.max()) < 0.25


def test_warm_up_leaves_no_trace(llama: Path, executor: Executor) -> None:
    prompts = prompts_of([20, 3], seed=9)
    fresh = executor_for(llama)
    warm_up(fresh)
    assert generate(fresh, prompts, NEW) == generate(executor, prompts, NEW)


def test_steps_without_rows_or_without_samples(executor: Executor) -> None:
    driver = Driver(executor)
    assert len(driver.run().tokens) == 0
    running = driver.start([5, 6, 7], Setup(slot=0))
    result = driver.run(table=driver.cover(running, 3), rows=[Row(slot=0, start=0, tokens=[5, 6, 7])])
    assert len(result.tokens) == 0 and result.busy_us > 0
