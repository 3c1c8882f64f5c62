"""What the frontends are told of a sequence: all of it, once, together as wished, after a preemption and again."""

from __future__ import annotations

from tests.support.harness import Harness, expect_short_outputs
from toka.messages import Outputs, Tokens, decode


def test_preemption_keeps_the_tokens():
    # Both are admitted though only one fits to its end.
    harness = Harness(pages=12, max_seqs=2)
    expect_short_outputs(harness)
    names = [harness.submit([10 + i] * 8, 40, ignore_eos=True) for i in range(2)]
    harness.drain()
    assert harness.scheduler.state.preemptions > 0
    assert all(len(harness.got[name, 0]) == 40 for name in names)
    # The younger one gave way once, and was computed again from its first page that had gone.
    assert 0 < harness.scheduler.state.recomputed <= harness.scheduler.state.preemptions * 48


def test_resubmitted_work_goes_on_where_it_was():
    harness = Harness(pages=60, max_seqs=4)
    request = harness.submit(list(range(4, 20)), 12, n=3, outputs=5, ignore_eos=True)
    harness.drain()
    for sample in range(3):
        assert harness.got[request, sample] == harness.expected(request, sample, 12, set())[0]


def test_resume_sends_again_from_where_the_frontend_is():
    harness = Harness(pages=60)
    request = harness.submit([4, 5, 6], 10, ignore_eos=True)
    harness.drain()
    tokens = harness.got[request, 0]
    harness.got[request, 0] = tokens[:3]
    finish = harness.finish.pop((request, 0))
    harness.scheduler.resume(request, 0, 3)
    harness.deliver(harness.scheduler.outputs(epoch=1))
    assert harness.got[request, 0] == tokens and harness.finish[request, 0] == finish


def test_tokens_are_delivered_together_as_wished_and_what_is_left_at_the_end():
    harness = Harness(pages=100)
    wished = {harness.submit([4, 5, 6], 10, outputs=2, delivery=each, ignore_eos=True): each for each in (1, 3, 64)}
    harness.drain()
    runs = {delivery: harness.runs[request, 0] for request, delivery in wished.items()}
    assert runs == {1: [1] * 8, 3: [3, 3, 2], 64: [8]}
    for request in wished:
        assert harness.got[request, 0] == harness.expected(request, 0, 10, set())[0]


def test_a_preempted_sequence_keeps_what_was_not_delivered():
    harness = Harness(pages=12, max_seqs=2)
    expect_short_outputs(harness)
    names = [harness.submit([10 + i] * 8, 40, delivery=16, ignore_eos=True) for i in range(2)]
    harness.drain()
    assert harness.scheduler.state.preemptions > 0
    assert [harness.runs[name, 0] for name in names] == [[16, 16, 8]] * 2
    assert all(harness.got[name, 0] == harness.expected(name, 0, 40, set())[0] for name in names)


def test_resume_sends_what_was_not_delivered_yet():
    harness = Harness(pages=60)
    request = harness.submit([4, 5, 6], 12, delivery=64, ignore_eos=True, logprobs=0)
    while harness.scheduler.state.slots.arrived.max() < 7:
        harness.step()
    assert not harness.got[request, 0]
    assert harness.scheduler.resume(request, 0, 0)
    (message,) = harness.scheduler.outputs(epoch=1)
    early = decode(message.payload)
    assert isinstance(early, Tokens) and early.counts.tolist() == [7]
    assert early.tokens.tolist() == harness.expected(request, 0, 7, set())[0]
    assert early.chosen.tolist() == [-position for position in range(7)]


def test_log_probabilities_come_with_their_tokens():
    harness = Harness(pages=60)
    harness.submit([4, 5], 5, delivery=3, ignore_eos=True)
    harness.submit([4, 5], 5, delivery=3, ignore_eos=True, logprobs=0)
    chosen: list[list[float]] = []
    deliver = harness.deliver

    def note(messages: list[Outputs]) -> None:
        for message in messages:
            tokens = decode(message.payload)
            assert isinstance(tokens, Tokens)
            chosen.append(tokens.chosen.tolist())
        deliver(messages)

    harness.deliver = note  # type: ignore[method-assign]
    harness.drain()
    assert [each for each in chosen if each] == [[0, -1, -2], [-3, -4]]


def test_resume_of_resubmitted_work_sends_the_log_probabilities_of_its_tokens():
    harness = Harness(pages=60)
    request = harness.submit([4, 5, 6], 10, outputs=5, ignore_eos=True, logprobs=0)
    harness.drain()
    harness.scheduler.resume(request, 0, 7)
    (message,) = harness.scheduler.outputs(epoch=1)
    tokens = decode(message.payload)
    assert isinstance(tokens, Tokens)
    assert tokens.tokens.tolist() == harness.got[request, 0][7:] and tokens.chosen.tolist() == [-7, -8, -9]
