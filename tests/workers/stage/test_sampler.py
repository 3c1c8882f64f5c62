"""What the sampler draws, against plain numpy and against the distribution it should follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.matching import some_allowed
from tests.support.plans import Setup, plan
from workers.stage.masks import Allowed, allowed
from workers.stage.sampler import Drawn, Sampler
from workers.stage.slots import Slots

VOCABULARY = 3000


def sampler_with(*setups: Setup, vocabulary: int = VOCABULARY) -> Sampler:
    slots = Slots(64, vocabulary, torch.device("cpu"))
    slots.set_up(plan(setups=setups))
    return Sampler(slots)


def sample(sampler: Sampler, logits: torch.Tensor, slots: Sequence[int], position: int = 0) -> Drawn:
    rows = np.arange(len(slots)) % len(logits)
    return sampler.sample(logits, rows, np.array(slots), np.full(len(slots), position))


def frequencies(setup: Setup, logits: torch.Tensor, draws: int = 4000) -> np.ndarray:
    """Shares of the ids drawn at positions 0, 1, 2, ..."""
    sampler = sampler_with(setup, vocabulary=len(logits))
    slots = np.full(draws, setup.slot)
    drawn = sampler.sample(logits[None], np.zeros(draws, np.int64), slots, np.arange(draws))
    return np.bincount(drawn.tokens.numpy(), minlength=len(logits)) / draws


def logits_of(rows: int, seed: int = 0, spread: float = 2.0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_is_greedy(dtype: torch.dtype) -> None:
    logits = logits_of(5).to(dtype)
    sampler = sampler_with(*(Setup(slot=i, temperature=0.0) for i in range(5)))
    assert torch.equal(sample(sampler, logits, range(5)).tokens, logits.float().argmax(1))


def test_several_slots_draw_from_one_row_each_for_itself() -> None:
    setups = [Setup(slot=i, seed=9, sample=i) for i in range(40)] + [Setup(slot=40, temperature=0.0)]
    logits = logits_of(2)
    slots = np.arange(41)
    drawn = sampler_with(*setups).sample(logits, np.ones(41, np.int64), slots, np.zeros(41, np.int64)).tokens
    assert len(set(drawn[:40].tolist())) > 20
    assert drawn[40] == logits[1].argmax()


def test_a_draw_does_not_depend_on_what_else_is_in_the_batch() -> None:
    kinds = [
        Setup(slot=0, seed=1),
        Setup(slot=1, seed=2, temperature=0.0),
        Setup(slot=2, seed=3, top_p=0.9),
        Setup(slot=3, seed=4, top_k=7, top_p=0.8),
        Setup(slot=4, seed=5, min_p=0.05, temperature=1.7),
        Setup(slot=5, seed=6, presence=0.5, repetition=1.2, prompt=[1, 2, 3], outputs=[4, 4]),
        Setup(slot=6, seed=7, bias={11: 5.0}, banned=[12], min_tokens=4),
        Setup(slot=7, seed=8, top_k=900),
    ]
    setups = [replace(kinds[i % 8], slot=i, seed=i, sample=i // 8) for i in range(48)]
    logits = logits_of(48, spread=1.0)
    sampler = sampler_with(*setups)
    together = sample(sampler, logits, range(48), position=2).tokens
    alone = [sample(sampler_with(s), logits[i : i + 1], [i], position=2).tokens for i, s in enumerate(setups)]
    assert torch.equal(torch.cat(alone), together)
    order = np.random.default_rng(0).permutation(48)
    shuffled = sample(sampler, logits[order], order, position=2).tokens
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    logits = logits_of(1, vocabulary=40)[0]
    got = frequencies(Setup(slot=3, temperature=temperature), logits)
    np.testing.assert_allclose(got, (logits / temperature).softmax(0).numpy(), atol=0.025)


def kept(logits: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution after min-p, top-k and top-p by their definitions; no ties in `logits`."""
    shares = np.exp(logits - logits.max())
    shares[shares < min_p] = 0
    order = np.argsort(-logits)
    if top_k:
        shares[order[top_k:]] = 0
    shares /= shares.sum()
    before = np.cumsum(shares[order]) - shares[order]
    shares[order[before >= top_p]] = 0
    return shares / shares.sum()


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0, 0, 0.5),
        (0, 0, 0.95),
        (0, 3, 1),
        (0, 20, 0.7),
        (0.1, 0, 1),
        (0.1, 6, 0.6),
        (0, 0, 1e-6),
        (0, 1, 1),
        (1, 0, 1),
    ],
)
@pytest.mark.parametrize("vocabulary", [40, 2500])
def test_filters(min_p: float, top_k: int, top_p: float, vocabulary: int) -> None:
    logits = logits_of(1, seed=2, vocabulary=vocabulary)[0]
    want = kept(logits.double().numpy(), min_p, top_k, top_p)
    got = frequencies(Setup(slot=0, min_p=min_p, top_k=top_k, top_p=top_p), logits)
    assert not got[want == 0].any()
    np.testing.assert_allclose(got, want, atol=0.03)
    if want.astype(bool).sum() < 30:
        assert got[want > 0.01].all()


def test_top_p_reaches_beyond_its_first_candidates() -> None:
    """A flat distribution: the nucleus is most of the vocabulary, and exactly that part is drawn from."""
    logits = torch.linspace(0, 0.1, VOCABULARY)
    sampler = sampler_with(Setup(slot=0, top_p=0.75))
    least = sampler._least(logits[None], np.array([0]))
    want = kept(logits.double().numpy(), 0, 0, 0.75)
    assert abs(int((logits >= least[0]).sum()) - int((want > 0).sum())) <= 1


def test_ties_at_the_limit_are_all_kept() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, -9.0])
    for setup in (Setup(slot=0, top_k=2), Setup(slot=0, top_p=0.6)):
        got = frequencies(setup, logits)
        assert got[:4].all() and not got[4]


def test_penalties_against_numpy() -> None:
    """Over several steps, for slots with and without, with the output's counts kept by the stage."""
    setups = [
        Setup(slot=0, temperature=0.0, presence=0.7, frequency=0.4, prompt=[5, 6], outputs=[7, 7, 8]),
        Setup(slot=1, temperature=0.0, repetition=1.6, prompt=[5, 6, 6], outputs=[9]),
        Setup(slot=2, temperature=0.0),
        Setup(slot=3, temperature=0.0, presence=-0.5, frequency=0.2, repetition=0.8, prompt=[1], outputs=[]),
    ]
    sampler = sampler_with(*setups, vocabulary=12)
    outputs = [list(setup.outputs) for setup in setups]
    for step in range(12):
        logits = logits_of(4, seed=step, vocabulary=12)
        tokens = sample(sampler, logits, range(4), position=step).tokens
        sampler.slots.record(np.arange(4), tokens)
        for i, setup in enumerate(setups):
            values = logits[i].double().numpy().copy()
            counts = np.bincount(outputs[i], minlength=12)
            seen = (counts > 0) | np.isin(np.arange(12), setup.prompt)
            repeated = np.where(values > 0, values / setup.repetition, values * setup.repetition)
            values = np.where(seen, repeated, values)
            values -= setup.frequency * counts + setup.presence * (counts > 0)
            assert tokens[i] == values.argmax(), (step, i)
            outputs[i].append(int(tokens[i]))


def test_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = 5.0
    sampler = sampler_with(Setup(slot=0, temperature=0.0, bias={2: 4.0}, banned=[4], min_tokens=3))
    drawn = [int(sample(sampler, logits, [0], position=i).tokens[0]) for i in range(5)]
    assert drawn == [2, 2, 2, 4, 4]
    assert logits[0, 2] == 0, "the logits are not the sampler's to change"


def test_a_slot_taken_over_forgets_everything() -> None:
    sampler = sampler_with(
        Setup(slot=0, temperature=0.0, bias={2: 100.0}, presence=50.0, prompt=[1], outputs=[3]), vocabulary=10
    )
    sampler.slots.set_up(plan(setups=[Setup(slot=0, temperature=0.0)]))
    logits = torch.arange(10.0)[None] == 3
    assert sample(sampler, logits.float(), [0]).tokens.tolist() == [3]
    sampler.slots.set_up(plan(setups=[Setup(slot=0, temperature=0.0, presence=50.0, prompt=[], outputs=[])]))
    assert sample(sampler, logits.float(), [0]).tokens.tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_raw_distribution(dtype: torch.dtype) -> None:
    setups = [
        Setup(slot=0, temperature=0.3, logprobs=0),
        Setup(slot=1),
        Setup(slot=2, temperature=0.0, logprobs=5, bias={17: 90.0}),
        Setup(slot=3, top_k=3, logprobs=2),
    ]
    logits = logits_of(4).to(dtype)
    drawn = sample(sampler_with(*setups), logits, range(4))
    want = torch.log_softmax(logits.double(), 1)
    rows, tokens = [0, 2, 3], drawn.tokens[[0, 2, 3]]
    torch.testing.assert_close(drawn.chosen.double(), want[rows, tokens], atol=1e-5, rtol=0)
    assert drawn.tokens[2] == 17
    top = torch.cat([want[2].topk(5).values, want[3].topk(2).values])
    torch.testing.assert_close(drawn.top_values.double(), top, atol=1e-5, rtol=0)
    at = torch.cat([want[2, drawn.top_ids[:5]], want[3, drawn.top_ids[5:]]])
    torch.testing.assert_close(at, top, atol=1e-12, rtol=0)


def test_a_mask_is_as_if_the_model_gave_nothing_else_a_chance() -> None:
    """Before all else, also where the others of its batch have none; log-probabilities stay the model's."""
    kinds = [
        Setup(slot=0),
        Setup(slot=0, temperature=0.0, logprobs=2),
        Setup(slot=0, top_p=0.7, logprobs=0),
        Setup(slot=0, top_k=40, min_p=0.01, temperature=1.4),
        Setup(slot=0, presence=0.5, frequency=-0.2, repetition=1.3, prompt=range(99), outputs=[4, 4]),
        Setup(slot=0, temperature=0.0, bias={7: 90.0, VOCABULARY // 3: -50.0}),
    ]
    setups = [replace(kinds[i % 6], slot=i, seed=i) for i in range(60)]
    masks = some_allowed(60, VOCABULARY)
    banned = torch.zeros(60, VOCABULARY, dtype=torch.bool)
    banned[torch.from_numpy(masks.constrained)] = torch.from_numpy(masks.banned(range(VOCABULARY)))
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(60).to(dtype)
        sampler, every = sampler_with(*setups), np.arange(60)
        before = logits.clone()
        drawn = sampler.sample(logits, every, every, every, masks)
        want = sampler.sample(logits.masked_fill(banned, float("-inf")), every, every, every)
        assert torch.equal(drawn.tokens, want.tokens) and torch.equal(logits, before)
        assert not banned[torch.arange(60), drawn.tokens].any()
        asked = [i for i, setup in enumerate(setups) if setup.logprobs >= 0]
        raw = logits.float().log_softmax(1)[asked, drawn.tokens[asked]]
        torch.testing.assert_close(drawn.chosen, raw, atol=1e-5, rtol=0)


def test_samples_of_one_row_each_have_their_mask() -> None:
    sampler = sampler_with(*(Setup(slot=i, temperature=0.0) for i in range(3)))
    bits = np.zeros((2, 4 * -(-VOCABULARY // 32)), np.uint8)
    bits[0, 5], bits[1, VOCABULARY // 8 - 1] = 1 << 3, 255
    given = Allowed(np.array([0, -1, 1]), bits)
    logits = torch.arange(VOCABULARY).float()[None]
    drawn = sampler.sample(logits, np.zeros(3, np.int64), np.arange(3), np.zeros(3, np.int64), given)
    assert drawn.tokens.tolist() == [43, VOCABULARY - 1, VOCABULARY - 1]


@pytest.mark.parametrize("ids", [range(3000), range(7), range(7, 16), range(13, 2999), range(2992, 3000)])
def test_the_share_of_a_mask_that_a_rank_needs(ids: range) -> None:
    masks = some_allowed(40, VOCABULARY)
    assert np.array_equal(masks.banned(ids), masks.banned(range(VOCABULARY))[:, ids.start : ids.stop])


def test_the_matcher_is_asked_for_steps_that_need_it_alone() -> None:
    asked: list[int] = []

    class Counting:
        def masks(self, step: int) -> np.ndarray:
            asked.append(step)
            return np.full(2 * 8, step, np.uint8)

        def sampled(self, step: int, slots: np.ndarray, tokens: np.ndarray) -> None:
            raise AssertionError

    matcher = Counting()
    assert allowed(matcher, 1, np.zeros(3, np.bool_)) is None and not asked
    found = allowed(matcher, 2, np.array([False, True, True]))
    assert found is not None and found.rows.tolist() == [-1, 0, 1] and found.bits.shape == (2, 8)
    assert found.of(np.array([2, 0])).rows.tolist() == [1, -1] and asked == [2]
