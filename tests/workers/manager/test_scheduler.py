"""The scheduler under random load, on a stage that checks every row's context."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.harness import EOS, VOCAB, Harness, expect_short_outputs
from tests.support.null_stage import draw
from toka.messages import Finish, SamplingParams, Work
from workers.manager.sequences import PRUNE_LEAST

ARRIVAL = st.fixed_dictionaries(
    {
        "prefix": st.integers(0, 2),
        "shared": st.integers(0, 20),
        "own": st.integers(1, 24),
        "max_tokens": st.integers(0, 24),
        "prompt_logprobs": st.sampled_from([-1, -1, 0, 2]),
        "n": st.sampled_from([1, 1, 1, 2, 5]),
        "ignore_eos": st.booleans(),
        "priority": st.sampled_from([0, 0, 1]),
        "gap": st.integers(0, 6),
        "cancel": st.sampled_from([None, None, None, 0, 1, 3, 9]),
        "delivery": st.sampled_from([1, 1, 3, 64]),
    }
)


@settings(deadline=None)
@given(
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=12),
    pages=st.integers(17, 40),
    page_size=st.sampled_from([1, 3, 4]),
    max_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    chunk=st.sampled_from([0, 1, 5]),
    depth=st.integers(1, 4),
    microbatches=st.sampled_from([1, 1, 2, 3, 5]),
    prefix_cache=st.booleans(),
    hurried=st.one_of(st.just([False]), st.lists(st.booleans(), min_size=1, max_size=7)),
    hopeful=st.booleans(),
)
def test_everything_finishes_as_it_should(
    arrivals, pages, page_size, max_seqs, budget, chunk, depth, microbatches, prefix_cache, hurried, hopeful
):
    pages = -(-pages * 4 // page_size)
    harness = Harness(
        depth=depth * microbatches,
        hurried=hurried,
        microbatches=microbatches,
        passes=depth,
        pages=pages,
        page_size=page_size,
        max_seqs=max_seqs,
        max_tokens_per_step=budget,
        prefill_chunk=chunk,
        prefix_cache=prefix_cache,
        context_length=68,
    )
    if hopeful:
        expect_short_outputs(harness)
    wanted: dict[bytes, dict] = {}
    cancelled: set[bytes] = set()
    due: list[tuple[int, bytes]] = []
    for number, a in enumerate(arrivals):
        prompt = [(7 * a["prefix"] + i) % (VOCAB - 4) + 4 for i in range(a["shared"])]
        prompt += [(number * 31 + i) % (VOCAB - 4) + 4 for i in range(a["own"])]
        options = {name: a[name] for name in ("ignore_eos", "priority", "delivery", "prompt_logprobs")}
        if a["prompt_logprobs"] < 0:
            a["max_tokens"] = max(1, a["max_tokens"])
        request = harness.submit(prompt, a["max_tokens"], a["n"], **options)
        wanted[request] = a
        if a["cancel"] is not None:
            due.append((harness.steps + a["cancel"], request))
        for _ in range(a["gap"]):
            harness.step()
            for when, victim in [d for d in due if d[0] <= harness.steps]:
                due.remove((when, victim))
                harness.scheduler.cancel(victim, [])
                cancelled.add(victim)
    for _, victim in due:
        harness.scheduler.cancel(victim, [])
        cancelled.add(victim)
    harness.drain()
    for request, a in wanted.items():
        assert harness.credits[request] == a["n"], "every sequence gives its credit back once"
        for sample in range(a["n"]):
            tokens, finish = harness.expected(request, sample, a["max_tokens"], set() if a["ignore_eos"] else {EOS})
            if request in cancelled:
                assert harness.got[request, sample] == tokens[: len(harness.got[request, sample])]
            else:
                assert harness.got[request, sample] == tokens
                assert harness.finish[request, sample] == finish
        harness.scheduler.release(request)
    assert not harness.scheduler.state.shards and not harness.scheduler.state.stops._users


def test_samples_share_the_prompt():
    harness = Harness(pages=200, max_seqs=32, max_tokens_per_step=64)
    request = harness.submit([*range(4, 40), 5, 6], 8, n=20, ignore_eos=True)
    harness.drain()
    # One prefill of 38 tokens, and 7 decode steps of each sample; none of the prompt is computed twice.
    assert harness.stage.computed == 38 + 20 * 7
    assert [harness.cached[request, s] for s in (0, 1)] == [0, 38]


def test_a_prefix_being_computed_is_waited_for():
    harness = Harness(pages=200, max_seqs=8, max_tokens_per_step=12)
    prefix = list(range(4, 44))
    for last in range(3):
        harness.submit([*prefix, 50 + last], 4, ignore_eos=True)
    harness.drain()
    assert harness.stage.computed == 40 + 3 + 3 * 3


def test_the_first_waiter_takes_over_when_the_computing_request_is_cancelled():
    harness = Harness(pages=200, max_seqs=8, max_tokens_per_step=12)
    prefix = list(range(4, 84))
    first = harness.submit([*prefix, 1], 4, ignore_eos=True)
    second = harness.submit([*prefix, 2], 4, ignore_eos=True)
    for _ in range(3):
        harness.step()
    harness.scheduler.cancel(first, [])
    harness.drain()
    assert len(harness.got[second, 0]) == 4
    assert harness.stage.computed < 2 * 80


def test_the_cache_is_used_again_and_never_whole():
    harness = Harness(pages=60)
    prompt = list(range(4, 24))
    harness.submit(prompt, 4, ignore_eos=True)
    harness.drain()
    before = harness.stage.computed
    again = harness.submit(prompt, 4, ignore_eos=True)
    harness.drain()
    assert harness.cached[again, 0] == 16
    assert harness.stage.computed - before == 4 + 3


def test_generated_pages_are_found_by_the_next_turn():
    harness = Harness(pages=60)
    prompt = list(range(4, 12))
    request = harness.submit(prompt, 9, ignore_eos=True)
    harness.drain()
    turn = harness.submit([*prompt, *harness.got[request, 0], 7, 8], 2, ignore_eos=True)
    harness.drain()
    assert harness.cached[turn, 0] == 16


def test_without_the_prefix_cache_everything_is_computed():
    harness = Harness(pages=60, prefix_cache=False)
    for _ in range(2):
        harness.submit(list(range(4, 24)), 4, ignore_eos=True)
        harness.drain()
    assert harness.stage.computed == 2 * (20 + 3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_full_cache_and_one_more_token(depth):
    harness = Harness(pages=24, depth=depth, max_seqs=4, max_tokens_per_step=96)
    long = harness.submit(list(range(4, 64)), 36, ignore_eos=True)
    for _ in range(4):
        harness.step()
    one = harness.submit(list(range(20, 70)), 1)
    harness.drain()
    assert len(harness.got[long, 0]) == 36 and len(harness.got[one, 0]) == 1


def test_a_warm_predictor_and_short_requests():
    harness = Harness(pages=24)
    for _ in range(40):
        harness.submit([5, 6, 7], 12)
        harness.drain()
    for max_tokens in (1, 2, 5):
        request = harness.submit([5, 6, 7], max_tokens, ignore_eos=True)
        harness.drain()
        assert len(harness.got[request, 0]) == max_tokens


def test_a_cache_too_small_for_two():
    harness = Harness(pages=10, max_seqs=4)
    names = [harness.submit([4 + i] * 20, 19, ignore_eos=True) for i in range(3)]
    harness.drain()
    assert all(len(harness.got[name, 0]) == 19 for name in names)


def test_an_old_request_is_not_overtaken_for_ever():
    harness = Harness(pages=16, max_seqs=4, max_tokens_per_step=32)
    running = harness.submit([9] * 20, 30, ignore_eos=True)
    harness.step()
    big = harness.submit([8] * 40, 20, ignore_eos=True)
    small = [harness.submit([10 + i] * 3, 4, ignore_eos=True) for i in range(10)]
    order: list[bytes] = []
    while harness.scheduler.state.live or harness.flying:
        harness.step()
        order += [name for (name, _), _ in harness.finish.items() if name not in order]
        if big in order:
            break
    assert order[0] == running, "none of the small ones went ahead of the big one while it waited"
    assert len(order) <= 1 + len(small) + 1
    harness.drain()


def test_urgent_requests_go_first():
    harness = Harness(pages=100, max_seqs=1)
    harness.submit([4, 5], 6, ignore_eos=True)
    harness.step()
    late = harness.submit([4, 6], 2, ignore_eos=True, priority=5)
    urgent = harness.submit([4, 7], 2, ignore_eos=True, priority=-1)
    harness.drain()
    assert list(harness.finish).index((urgent, 0)) < list(harness.finish).index((late, 0))


def test_cancelling_some_samples_leaves_the_others():
    harness = Harness(pages=100, max_seqs=2)
    request = harness.submit(list(range(4, 20)), 12, n=5, ignore_eos=True)
    for _ in range(3):
        harness.step()
    harness.scheduler.cancel(request, [0, 3])
    harness.drain()
    assert [len(harness.got[request, s]) for s in (1, 2, 4)] == [12] * 3
    assert (request, 0) not in harness.finish and (request, 3) not in harness.finish
    assert harness.credits[request] == 5


def test_what_is_cancelled_while_it_waits_does_not_pile_up():
    harness = Harness(pages=60, max_seqs=1)
    running = harness.submit([4, 5], 20, ignore_eos=True)
    harness.step()
    for _ in range(5 * PRUNE_LEAST):
        harness.scheduler.release(harness.submit([4, 6], 2))
    waiting = harness.submit([4, 7], 2, ignore_eos=True)
    assert len(harness.scheduler.state.waiting) <= 2 * PRUNE_LEAST
    harness.drain()
    assert len(harness.got[running, 0]) == 20 and len(harness.got[waiting, 0]) == 2


def test_stop_token_ids():
    harness = Harness(pages=60)
    first = draw(1, 0, 3, VOCAB)
    request = harness.submit([4, 5], 20, stop_token_ids=[first], ignore_eos=True)
    harness.drain()
    assert harness.finish[request, 0] == Finish.STOP and harness.got[request, 0][-1] == first


def test_a_shared_prefix_makes_a_group():
    harness = Harness(pages=400, max_seqs=8, max_tokens_per_step=512, context_length=512)
    prefix = [(i * 7) % 90 + 4 for i in range(300)]
    for last in range(6):
        harness.submit([*prefix, 4 + last], 6, ignore_eos=True)
    grouped = []
    while harness.scheduler.state.live:
        if (planned := harness.scheduler.plan()) is None:
            break
        plan, sent = planned
        grouped.append((plan.group_row_counts.tolist(), plan.group_page_counts.tolist()))
        harness.scheduler.result(sent, harness.stage.run(plan))
    assert ([6], [75]) in grouped


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 4, "empty"),
        ([4], 0, "no token"),
        ([VOCAB], 4, "0..96"),
        ([-1], 4, "0..96"),
        ([4] * 95, 2, "context is 96"),
        ([4] * 60, 30, "KV cache holds 80"),
    ],
)
def test_what_can_never_run_is_refused(prompt, max_tokens, says):
    harness = Harness(pages=20)
    work = Work(
        params=SamplingParams(max_tokens=max_tokens),
        samples=[0],
        output_counts=[0],
        prompt=np.array(prompt, np.int32),
        outputs=np.empty(0, np.int32),
    )
    assert says in harness.scheduler.check(work)


@pytest.mark.parametrize(
    ("params", "samples"),
    [
        ({"seed": -1}, [0]),
        ({"seed": 1 << 64}, [0]),
        ({"top_k": 1 << 31}, [0]),
        ({"min_tokens": -1}, [0]),
        ({"logprobs": VOCAB + 1}, [0]),
        ({"prompt_logprobs": VOCAB + 1}, [0]),
        ({"prompt_logprobs": -2}, [0]),
        ({"logit_bias": {VOCAB: 1.0}}, [0]),
        ({"stop_token_ids": [-1]}, [0]),
        ({}, [1 << 31]),
        ({}, [-1]),
    ],
)
def test_numbers_that_no_array_takes_are_refused(params, samples):
    """From a frontend that is not ours: they must not end the manager."""
    work = Work(
        params=SamplingParams(max_tokens=4, **params),
        samples=samples,
        output_counts=[0],
        prompt=np.array([4], np.int32),
        outputs=np.empty(0, np.int32),
    )
    assert re.search("range|0..96|to 97", Harness(pages=20).scheduler.check(work))
