"""Filters, edits and log-probabilities on a GPU, against the sampler in torch; and that they neither wait nor grow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Thread

import numpy as np
import pytest
import torch

from tests.support.matching import some_allowed
from tests.support.plans import Row, Setup, plan
from tests.support.stage import Driver
from tests.support.tiny import VOCAB_SIZE, tiny_model
from toka.config import Config
from workers.stage.build import build
from workers.stage.masks import Allowed
from workers.stage.sampler import Drawn, Sampler
from workers.stage.slots import Slots

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from workers.stage.cuda.draw import Draw
from workers.stage.cuda.executor import CudaExecutor
from workers.stage.cuda.special import PORTION_BYTES, Found, Special, found

CUDA = torch.device("cuda")
VOCABULARY, LLAMA = 20_001, 128_256
OPTIONS = {
    "top_p": Setup(slot=0, top_p=0.8),
    "narrow_top_p": Setup(slot=0, top_p=1e-6),
    "top_k": Setup(slot=0, top_k=9),
    "greedy_top_k": Setup(slot=0, top_k=1),
    "top_k_of_all": Setup(slot=0, top_k=VOCABULARY + 7, top_p=0.99),
    "min_p": Setup(slot=0, min_p=0.05, temperature=1.7),
    "greatest_min_p": Setup(slot=0, min_p=1.0),
    "filters": Setup(slot=0, top_k=900, top_p=0.9, min_p=1e-4, temperature=0.6),
    "presence": Setup(slot=0, presence=1.5, outputs=[3, 3, 8]),
    "frequency": Setup(slot=0, frequency=-0.4, prompt=[5], outputs=[7, 7, 8]),
    "repetition": Setup(slot=0, repetition=1.3, prompt=[1, 2], outputs=[3]),
    "penalties": Setup(slot=0, presence=0.4, frequency=0.2, repetition=0.8, prompt=[5, 6], outputs=[9, 9], top_p=0.9),
    "bias": Setup(slot=0, bias={8: 9.0, 17: -100.0, VOCABULARY - 1: 8.0}),
    "bans": Setup(slot=0, temperature=0.0, bias={4: 50.0, 5: 40.0}, banned=[4, 6], min_tokens=4),
    "logprob": Setup(slot=0, logprobs=0),
    "logprobs": Setup(slot=0, temperature=0.0, logprobs=5),
    "many_logprobs": Setup(slot=0, logprobs=1000, top_p=0.7),
    "everything": Setup(
        slot=0, bias={2: 9.0, 8: 4.0}, banned=[8], min_tokens=3, repetition=1.5, presence=0.5, prompt=[8], logprobs=20
    ),
}
LARGE = ("bias", "many_logprobs")
"""What a tiny vocabulary does not hold."""


def logits_of(rows: int, vocabulary: int = VOCABULARY, spread: float = 2.0) -> torch.Tensor:
    values = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * spread
    return values.bfloat16().to(CUDA)


class Both:
    """The same slots in the sampler and in Special."""

    def __init__(self, setups: list[Setup], vocabulary: int = VOCABULARY) -> None:
        made, count = plan(setups=setups), len(setups)
        self.where = np.array([setup.slot for setup in setups], np.int32)
        self.slots = Slots(count + 1, vocabulary, CUDA)
        self.slots.set_up(made)
        self.sampler = Sampler(self.slots)
        self.draw = Draw(
            lambda hidden: hidden, range(vocabulary), torch.zeros(count + 1, dtype=torch.int64, device=CUDA)
        )
        self.draw.set_up(made)
        self.special = Special(self.draw, 2, count)
        self.special.set_up(made)

    def step(self, logits: torch.Tensor, output: int, allowed: Allowed | None = None) -> tuple[Found, Drawn]:
        rows, outputs = np.arange(len(logits)), np.full(len(logits), output, np.int32)
        want = self.sampler.sample(logits.float(), rows, self.where.astype(np.int64), outputs.astype(np.int64), allowed)
        self.slots.record(self.where.astype(np.int64), want.tokens)
        wanted = self.special.wanted(self.where)
        width, size = self.special.width(wanted), self.special.size(len(logits))
        self.special.fill(rows, self.where, outputs, allowed)
        self.special.run(logits, size, width)
        results = self.special.results(len(logits), width).cpu().numpy()
        return found([results], wanted, width), want


def check(got: Found, want: Drawn, logits: torch.Tensor, counts: list[int]) -> None:
    assert got.tokens.tolist() == want.tokens.tolist()
    np.testing.assert_allclose(got.chosen, want.chosen.cpu().numpy(), atol=1e-3)
    np.testing.assert_allclose(got.top_values, want.top_values.cpu().numpy(), atol=1e-3)
    exact = logits.double().log_softmax(1).cpu().numpy()
    at = 0
    for row, count in enumerate(counts):
        # Of equal values the lowest ids, in order.
        order = np.lexsort((np.arange(exact.shape[1]), -exact[row]))[: max(0, count)]
        assert got.top_ids[at : at + len(order)].tolist() == order.tolist()
        at += len(order)
    assert at == len(got.top_ids)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_alone(name: str) -> None:
    both = Both([replace(OPTIONS[name], slot=0, seed=77)])
    logits = logits_of(1)
    for output in range(8):
        got, want = both.step(logits, output)
        check(got, want, logits, [OPTIONS[name].logprobs])
        assert both.draw.last[0] == int(got.tokens[0])


@pytest.mark.parametrize("spread", [2.0, 0.02])
def test_all_options_mixed(spread: float) -> None:
    kinds = list(OPTIONS.values())
    setups = [replace(kinds[i % len(kinds)], slot=i, seed=i * 7919 << 40 | i, sample=i % 7) for i in range(90)]
    both = Both(setups)
    logits = logits_of(90, spread=spread)
    for output in range(8):
        got, want = both.step(logits, output)
        check(got, want, logits, [setup.logprobs for setup in setups])


def test_masks_among_all_options() -> None:
    kinds = [Setup(slot=0), *OPTIONS.values()]
    for output in range(4):
        allowed = some_allowed(90, VOCABULARY, output)
        constrained = allowed.constrained.tolist()
        setups = [replace(kinds[i % len(kinds)], slot=i, seed=i, constrained=constrained[i]) for i in range(90)]
        both, logits = Both(setups), logits_of(90)
        assert both.special.constrained[:90].tolist() == constrained
        assert both.special.among(both.where, np.full(90, 99, np.int32))[allowed.constrained].all()
        got, want = both.step(logits, output, allowed)
        check(got, want, logits, [setup.logprobs for setup in setups])
        banned = allowed.banned(range(VOCABULARY))
        assert not banned[np.arange(len(banned)), got.tokens[allowed.constrained]].any()


def test_a_slot_taken_over_is_plain_and_has_no_edits() -> None:
    both = Both([replace(OPTIONS["everything"], slot=0), replace(OPTIONS["bans"], slot=1)])
    outputs = np.array([9, 9], np.int32)
    assert both.special.among(both.where, outputs - 9).all()
    both.special.set_up(plan(setups=[Setup(slot=0)]))
    assert both.special.among(both.where, outputs).tolist() == [False, True]
    assert both.special.edits.lists.bool().tolist() == [False, True, False] and not both.special.edits.counts.any()


def test_bans_alone_are_special_until_they_end() -> None:
    both = Both([Setup(slot=0, banned=[4], min_tokens=3)])
    assert [bool(both.special.among(both.where, np.array([i], np.int32))[0]) for i in range(5)] == [True] * 3 + [
        False
    ] * 2


@dataclass
class Case:
    executor: CudaExecutor
    setups: list[Setup]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    tiny_model(folder, "llama", intermediate_size=512, **shape)
    config = Config(model=str(folder), dtype="bfloat16", device="cuda", kv_cache_tokens=16 * 400, max_seqs=60)
    executor = build(config)
    assert isinstance(executor, CudaExecutor)
    plain = Setup(slot=0)
    kinds = [
        plain,
        *(setup for name, setup in OPTIONS.items() if name not in LARGE),
        plain,
        replace(plain, temperature=0),
    ]
    yield Case(executor, [replace(kinds[i % len(kinds)], slot=i, seed=i) for i in range(60)])


def decode(case: Case, steps: int) -> list[np.ndarray]:
    """Tokens of steps of one row for each slot; nothing waits while a step is submitted."""
    executor, driver = case.executor, Driver(case.executor)
    rows = [Row(slot=s.slot, start=0, tokens=[7 + s.slot], samples=[(s.slot, 0)]) for s in case.setups]
    executor.execute(plan(setups=case.setups, table=[(s.slot, 0, driver.free.pop()) for s in case.setups], rows=rows))
    plans = [
        plan(step=i, rows=[Row(slot=s.slot, start=i, tokens=[-1], samples=[(s.slot, i)]) for s in case.setups])
        for i in range(1, steps)
    ]
    # Slots are handed over within the loop, too.
    plans.append(plan(step=steps, setups=case.setups))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in plans:
            executor.submit(each)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = [executor.collect() for _ in plans]
    asked = sum(s.logprobs >= 0 for s in case.setups)
    assert all(len(each.chosen) == asked for each in results[:-1])
    return [each.tokens for each in results[:-1]]


def test_a_step_with_every_option_never_waits(case: Case) -> None:
    """Twice the same tokens, too: counts and lists of slots start anew."""
    decode(case, 3)
    first, second = decode(case, 12), decode(case, 12)
    assert np.array_equal(first, second)


def test_many_special_rows_stay_within_their_memory() -> None:
    rows = 4096
    weight = torch.randn(LLAMA, 64, device=CUDA, dtype=torch.bfloat16)
    last = torch.zeros(rows + 1, dtype=torch.int64, device=CUDA)
    draw = Draw(lambda hidden: hidden @ weight.T, range(LLAMA), last)
    made = plan(setups=[Setup(slot=i, seed=i, top_p=0.9, logprobs=20 if i % 2 else -1) for i in range(rows)])
    draw.set_up(made)
    special = Special(draw, 2, rows)
    special.set_up(made)
    hidden = torch.randn(rows, 64, device=CUDA, dtype=torch.bfloat16)
    every, zeros = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    width = special.width(special.wanted(every))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for start in range(0, rows, special.rows):
        part = slice(start, start + special.rows)
        special.fill(every[part], every[part], zeros[part])
        special.run(hidden, special.rows, width)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < PORTION_BYTES * 1.1
    assert len(set(last[:rows].tolist())) > rows // 4


class Following:
    """A matcher that allows one id, which follows from the one before it."""

    def __init__(self, slots: int) -> None:
        self.known: dict[int, np.ndarray] = {0: np.arange(slots, dtype=np.int32)}
        self._changed = Condition()

    @staticmethod
    def after(tokens: np.ndarray) -> np.ndarray:
        return (tokens * 7 + 3) % VOCAB_SIZE

    def masks(self, step: int) -> np.ndarray:
        """Of step 1 without having seen any; others wait for what the step before them drew."""
        with self._changed:
            assert self._changed.wait_for(lambda: step - 1 in self.known, 20), "nobody tells what was drawn"
            ids = self.after(self.known[step - 1])
        return np.packbits(np.eye(VOCAB_SIZE, dtype=np.uint8)[ids], axis=1, bitorder="little").reshape(-1)

    def sampled(self, step: int, slots: np.ndarray, tokens: np.ndarray) -> None:
        with self._changed:
            self.known[step] = tokens
            self._changed.notify_all()


def test_steps_that_wait_for_masks_while_another_thread_tells_what_was_drawn(case: Case) -> None:
    """Every third sample is constrained, the others are drawn as ever; nothing waits for itself."""
    executor, driver, steps = case.executor, Driver(case.executor), 12
    setups = [replace(setup, banned=[], bias={}, constrained=setup.slot % 3 == 0) for setup in case.setups]
    own = [setup.slot for setup in setups if setup.constrained]
    executor.matcher = matcher = Following(len(own))
    table = [(setup.slot, 0, driver.free.pop()) for setup in setups]
    plans = [
        plan(
            step=i,
            setups=setups if i == 1 else [],
            table=table if i == 1 else [],
            rows=[
                Row(slot=s.slot, start=i - 1, tokens=[-1 if i > 1 else 7], samples=[(s.slot, i - 1)]) for s in setups
            ],
        )
        for i in range(1, steps)
    ]
    results = []
    launched: list[int] = []

    def collect() -> None:
        for at in range(len(plans)):
            while len(launched) <= at:
                time.sleep(0.001)
            results.append(executor.collect())

    collecting = Thread(target=collect, daemon=True)
    collecting.start()
    try:
        for each in plans:
            executor.submit(each)
            launched.append(each.step)
        collecting.join(20)
    finally:
        executor.matcher = None
    assert len(results) == len(plans)
    want = matcher.known[0]
    for result in results:
        want = matcher.after(want)
        assert result.tokens[own].tolist() == want.tolist()
    others = [slot for slot in range(len(setups)) if slot not in own]
    assert len({tuple(result.tokens[others].tolist()) for result in results}) > 1
    # The slots are free of it for whoever comes next.
    executor.execute(plan(step=99, setups=[Setup(slot=i) for i in range(len(setups))]))
    assert executor.sampling is not None and not executor.sampling.special.constrained.any()
