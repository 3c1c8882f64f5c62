"""Priorities: who is admitted, who gives way, and that both hold under preemption."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.harness import EOS, VOCAB, Harness, expect_short_outputs
from workers.manager.slots import SlotState

BATCH = 1 << 20
"""As frontends have it for what batches ask for."""


class Watched(Harness):
    """Sees to it that each preemption hits the last of the least urgent, and notes whom it hit."""

    def __init__(self, **limits: object) -> None:
        super().__init__(**limits)  # type: ignore[arg-type]
        self.preempted: list[bytes] = []
        state = self.scheduler.state
        preempt = state.preempt

        def checked(slot: int) -> None:
            slots = state.slots
            running = slots.active()
            assert slots.priority[slot] == slots.priority[running].max(), "a more urgent one gave way"
            same = running[slots.priority[running] == slots.priority[slot]]
            assert slots.age[slot] == slots.age[same].max(), "not the last one of its priority"
            sequence = slots.sequence[slot]
            assert sequence is not None
            self.preempted.append(sequence.shard.request)
            preempt(slot)

        state.preempt = checked  # type: ignore[method-assign]

    def running(self) -> list[bytes]:
        slots = self.scheduler.state.slots
        return [sequence.shard.request for slot in slots.active() if (sequence := slots.sequence[slot])]

    def until_running(self, *requests: bytes, steps: int = 30) -> int:
        """Steps until all of these have a slot."""
        began = self.steps
        while not set(requests) <= set(self.running()):
            assert self.steps - began < steps and self.step()
        return self.steps - began

    def order(self) -> list[bytes]:
        """Requests in the order in which their first samples ended."""
        return [request for request, sample in self.finish if sample == 0]

    def check_tokens(self, *requests: bytes, max_tokens: int) -> None:
        for request in requests:
            assert self.got[request, 0] == self.expected(request, 0, max_tokens, set())[0]


def filled(count: int, max_tokens: int, priority: int, **limits: object) -> tuple[Watched, list[bytes]]:
    """`count` requests of one priority that run; prompts of 8 tokens that share nothing."""
    harness = Watched(**limits)
    requests = [
        harness.submit([4 + 9 * i + j for j in range(8)], max_tokens, ignore_eos=True, priority=priority)
        for i in range(count)
    ]
    harness.until_running(*requests)
    for _ in range(5):
        harness.step()
    assert not harness.preempted
    return harness, requests


def test_an_urgent_one_does_not_wait_for_a_slot():
    harness, batch = filled(4, 60, BATCH, pages=200, max_seqs=4)
    urgent = harness.submit([4, 5, 6], 3, ignore_eos=True)
    assert harness.until_running(urgent) <= harness.depth + 2
    assert harness.preempted == [batch[-1]], "one gives way, the last one admitted"
    harness.drain()
    assert harness.order()[0] == urgent and harness.order()[-1] == batch[-1]
    harness.check_tokens(*batch, max_tokens=60)


def test_an_urgent_one_does_not_wait_for_pages():
    """Four of 20 pages in the end, in a cache of 60: three run, and the urgent one needs 15 of their pages at once."""
    harness, batch = filled(3, 72, BATCH, pages=60, max_seqs=8, max_tokens_per_step=96)
    while harness.scheduler.state.pages.available > 10:
        harness.step()
    urgent = harness.submit([(7 * i) % 90 + 4 for i in range(60)], 4, ignore_eos=True)
    harness.step()
    assert urgent in harness.running() and harness.preempted == [batch[-1]]
    harness.drain()
    assert harness.order()[0] == urgent
    harness.check_tokens(*batch, max_tokens=72)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_many_urgent_ones_come_at_once(microbatches):
    depth = 2 * microbatches
    limits = {"pages": 400, "max_seqs": 8, "microbatches": microbatches, "depth": depth}
    harness, batch = filled(8, 60, BATCH, **limits, max_tokens_per_step=64)
    urgent = [harness.submit([4, 5 + i], 20, ignore_eos=True) for i in range(4)]
    group = harness.submit([30, 31, 32], 20, n=4, ignore_eos=True)
    assert harness.until_running(*urgent, group) <= depth + 2, "their slots come free together"
    while len(harness.running()) < 8:
        harness.step()
    assert sorted(harness.running()) == sorted([*urgent, *[group] * 4])
    assert sorted(harness.preempted) == sorted(batch)
    harness.drain()
    assert set(harness.order()[:5]) == {*urgent, group}
    harness.check_tokens(*batch, max_tokens=60)


def test_nobody_gives_way_to_an_equal():
    harness, first = filled(4, 40, 3, pages=200, max_seqs=4)
    second = [harness.submit([4, 5 + i], 4, ignore_eos=True, priority=3) for i in range(4)]
    later = harness.submit([50, 51], 4, ignore_eos=True, priority=7)
    harness.drain()
    assert not harness.preempted
    order = harness.order()
    assert set(order[:4]) == set(first) and set(order[4:8]) == set(second) and order[8] == later


def test_what_could_not_start_anyway_makes_nobody_give_way():
    """The rest of the cache is held by its equals: the batch goes on."""
    harness = Watched(pages=40, max_seqs=4, max_tokens_per_step=128)
    interactive = harness.submit([(5 * i) % 90 + 4 for i in range(80)], 14, ignore_eos=True)
    batch = harness.submit([60, 61, 62], 9, ignore_eos=True, priority=BATCH)
    harness.until_running(interactive, batch)
    large = harness.submit([(7 * i) % 90 + 4 for i in range(90)], 6, ignore_eos=True)
    while batch not in harness.order():
        harness.step()
    assert not harness.preempted and large not in harness.running()
    harness.drain()
    assert harness.order() == [batch, interactive, large]


def test_what_was_cancelled_makes_nobody_give_way():
    harness, _ = filled(4, 40, BATCH, pages=200, max_seqs=4)
    for number in range(3):
        harness.scheduler.cancel(harness.submit([4, 5 + number], 4), [])
    harness.drain()
    assert not harness.preempted


def test_who_gave_way_keeps_its_place():
    """Before those of its priority that never ran, and the first of several first."""
    harness, batch = filled(4, 40, BATCH, pages=200, max_seqs=4)
    behind = [harness.submit([4, 50 + i], 2, ignore_eos=True, priority=BATCH) for i in range(3)]
    urgent = [harness.submit([4, 5 + i], 5 * (i + 1), ignore_eos=True) for i in range(4)]
    harness.until_running(*urgent)
    harness.drain()
    assert sorted(harness.preempted) == sorted(batch), "each once"
    order = harness.order()
    assert order[:5] == [*urgent, batch[0]] and [each for each in order if each in batch] == batch
    harness.check_tokens(*batch, max_tokens=40)
    harness.check_tokens(*behind, max_tokens=2)


def test_an_urgent_prompt_is_computed_first():
    harness = Watched(pages=200, max_seqs=8, max_tokens_per_step=8, context_length=400)
    shared = [(7 * i) % 90 + 4 for i in range(120)]
    long = [harness.submit([*shared, 5 + i], 2, ignore_eos=True, priority=BATCH) for i in range(2)]
    harness.until_running(long[0])
    urgent = harness.submit([50, 51, 52], 2, ignore_eos=True)
    beginning = harness.submit(shared[:40], 2, ignore_eos=True)
    before = harness.steps
    while not {urgent, beginning} <= set(harness.order()):
        harness.step()
    assert harness.steps - before < 12, "neither waits for what the batch computes, though it is the same prefix"
    assert not set(long) & set(harness.order())
    harness.drain()


ARRIVAL = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 20),
        "own": st.integers(1, 24),
        "max_tokens": st.integers(1, 24),
        "n": st.sampled_from([1, 1, 1, 2, 5]),
        "priority": st.sampled_from([-1, 0, 0, BATCH, BATCH, BATCH + 1]),
        "gap": st.integers(0, 6),
        "cancel": st.sampled_from([False, False, False, True]),
    }
)


@given(
    arrivals=st.lists(ARRIVAL, min_size=2, max_size=14),
    pages=st.integers(17, 40),
    max_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    depth=st.integers(1, 3),
    microbatches=st.sampled_from([1, 1, 3]),
    hopeful=st.booleans(),
)
def test_priorities_hold_under_any_load(arrivals, pages, max_seqs, budget, depth, microbatches, hopeful):
    harness = Watched(
        depth=depth * microbatches, microbatches=microbatches, passes=depth, pages=pages, max_seqs=max_seqs,
        max_tokens_per_step=budget, context_length=68,
    )  # fmt: skip
    if hopeful:
        expect_short_outputs(harness)
    wanted: dict[bytes, dict] = {}
    for number, a in enumerate(arrivals):
        prompt = [(i * 7) % (VOCAB - 4) + 4 for i in range(a["shared"])]
        prompt += [(number * 31 + i) % (VOCAB - 4) + 4 for i in range(a["own"])]
        request = harness.submit(prompt, a["max_tokens"], a["n"], priority=a["priority"])
        wanted[request] = a
        for _ in range(a["gap"]):
            harness.step()
            no_less_urgent_goes_ahead(harness)
        if a["cancel"]:
            harness.scheduler.cancel(request, [])
    while harness.scheduler.state.live and harness.step():
        no_less_urgent_goes_ahead(harness)
    harness.drain()
    for request, a in wanted.items():
        for sample in range(a["n"]):
            tokens, _ = harness.expected(request, sample, a["max_tokens"], {EOS})
            got = harness.got[request, sample]
            assert got == (tokens[: len(got)] if a["cancel"] else tokens)


def no_less_urgent_goes_ahead(harness: Watched) -> None:
    """Whoever was admitted in this step was at least as urgent as all that waited and were not parked."""
    state = harness.scheduler.state
    fresh = np.flatnonzero(state.slots.fresh & (state.slots.state == SlotState.PREFILL))
    waiting = [
        priority
        for priority, queue in state.waiting._queues.items()
        for entry in queue
        if not all(each.ended for each in entry.group())
    ]
    if len(fresh) and waiting:
        assert state.slots.priority[fresh].max() <= min(waiting)
