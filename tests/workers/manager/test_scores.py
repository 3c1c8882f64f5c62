"""Log-probabilities of prompts: each once, in order, before any token, whatever happens to what computes them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.harness import Harness, expect_short_outputs
from tests.support.null_stage import score
from toka.messages import Finish, SamplingParams, Scores, Work, decode

PROMPT = list(range(4, 42))
ALL = [np.float32(score(place, following)) for place, following in enumerate(PROMPT[1:])]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_prompt_is_scored_once_for_all_samples(max_tokens, prefix_cache):
    harness = Harness(pages=200, max_seqs=16, prefix_cache=prefix_cache)
    request = harness.submit(PROMPT, max_tokens, n=12, prompt_logprobs=2, ignore_eos=True)
    harness.drain()
    assert harness.scores[request] == ALL and harness.stage.scored == len(ALL)
    assert [harness.finish[request, sample] for sample in range(12)] == [Finish.LENGTH] * 12
    assert [len(harness.got[request, sample]) for sample in range(12)] == [max_tokens] * 12
    assert harness.credits[request] == 12
    assert harness.stage.computed == 38 + 12 * max(0, max_tokens - 1)


def test_a_cached_prefix_is_computed_again_and_then_shared():
    harness = Harness(pages=200)
    harness.submit(PROMPT, 1)
    harness.drain()
    scored = harness.submit(PROMPT, 1, prompt_logprobs=0)
    harness.drain()
    assert harness.scores[scored] == ALL and harness.cached[scored, 0] == 0
    plain = harness.submit(PROMPT, 1)
    harness.drain()
    assert harness.cached[plain, 0] == 36 and harness.stage.computed == 38 + 38 + 2


def test_one_that_waits_for_a_prefix_does_not_wait_to_be_scored():
    harness = Harness(pages=200, max_tokens_per_step=12)
    harness.submit(PROMPT, 3, ignore_eos=True)
    scored = [harness.submit(PROMPT, 3, prompt_logprobs=1, ignore_eos=True) for _ in range(2)]
    harness.drain()
    assert [harness.scores[each] for each in scored] == [ALL, ALL]


def test_a_prompt_of_one_token_has_none():
    harness = Harness(pages=20)
    for max_tokens in (0, 2):
        request = harness.submit([5], max_tokens, prompt_logprobs=3, ignore_eos=True)
        harness.drain()
        assert request not in harness.scores and len(harness.got[request, 0]) == max_tokens


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_preemption_between_chunks_loses_and_doubles_none(max_tokens, depth):
    """What was scored is used again as far as it is in the cache."""
    harness = Harness(pages=24, max_tokens_per_step=8, depth=depth)
    request = harness.submit(PROMPT, max_tokens, n=2, prompt_logprobs=1, ignore_eos=True)
    state = harness.scheduler.state
    while state.slots.planned.max() < 16:
        harness.step()
    (slot,) = state.slots.active()
    assert state.slots.planned[slot] < len(PROMPT)
    state.preempt(int(slot))
    harness.drain()
    assert harness.scores[request] == ALL and harness.stage.scored == len(ALL)
    assert harness.finish[request, 0] == harness.finish[request, 1] == Finish.LENGTH


def test_with_a_cache_too_small_for_all():
    harness = Harness(pages=24, max_tokens_per_step=24, max_seqs=4, depth=3)
    expect_short_outputs(harness)
    names = [harness.submit([4 + i, *PROMPT[1:30]], 30, prompt_logprobs=1, ignore_eos=True) for i in range(6)]
    harness.drain()
    assert harness.scheduler.state.preemptions > 0
    assert all(harness.scores[each] == ALL[:29] and len(harness.got[each, 0]) == 30 for each in names)


def test_the_leader_is_cancelled_while_its_prompt_is_scored():
    harness = Harness(pages=60, max_tokens_per_step=8)
    request = harness.submit(PROMPT, 4, n=3, prompt_logprobs=1, ignore_eos=True)
    for _ in range(3):
        harness.step()
    harness.scheduler.cancel(request, [0])
    harness.drain()
    assert harness.scores[request] == ALL and harness.stage.scored == len(ALL)
    assert len(harness.got[request, 1]) == len(harness.got[request, 2]) == 4


def test_what_did_not_arrive_is_sent_again():
    harness = Harness(pages=60, max_tokens_per_step=8)
    request = harness.submit(PROMPT, 2, prompt_logprobs=2, ignore_eos=True)
    harness.drain()
    assert harness.scheduler.resume(request, 0, 1, 30)
    scores, tokens = (decode(each.payload) for each in harness.scheduler.outputs(epoch=1))
    assert isinstance(scores, Scores) and scores.first.tolist() == [30] and scores.counts.tolist() == [7]
    assert scores.chosen.tolist() == ALL[30:] and len(scores.top_ids) == 14
    assert (tokens.first.tolist(), tokens.counts.tolist()) == ([1], [1])
    assert harness.scheduler.resume(request, 0, 2, 37)
    assert len(harness.scheduler.outputs(epoch=1)) == 1


def test_others_get_no_log_probabilities():
    harness = Harness(pages=60)
    harness.submit(PROMPT, 2, logprobs=1)
    harness.drain()
    assert harness.stage.scored == 0 and not harness.scores


def test_scoring_alone_needs_no_token_but_outputs_do_not_go_with_it():
    harness = Harness(pages=20)
    work = Work(
        params=SamplingParams(max_tokens=4, prompt_logprobs=0),
        samples=[0],
        output_counts=[1],
        prompt=np.array([4, 5], np.int32),
        outputs=np.array([6], np.int32),
    )
    assert "before any output" in harness.scheduler.check(work)
