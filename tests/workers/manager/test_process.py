"""The manager as a process, over real sockets, between a broker's end and a null stage."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.replica import VOCAB, Replica, expected, welcome
from toka.messages import (
    Cancel,
    Compile,
    Compiled,
    Constrain,
    Fenced,
    GrammarFailed,
    JoinReplica,
    Outputs,
    Ping,
    Pong,
    Refused,
    Release,
    Resume,
    State,
    Stop,
    Submit,
    decode,
)

HANGS = """
import time
from workers.manager import __main__, loop
loop.HUNG_SECONDS = 0.5
loop.Loop._turn = lambda self: time.sleep(60)
__main__.main()
"""


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    made = Replica(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_request_from_submit_to_release(replica):
    joined = welcome(replica)
    assert (joined.replica, joined.holds, joined.credits) == ("r0", [], 8)
    assert (joined.card.vocab_size, joined.card.context_length, joined.card.kv_cache_tokens) == (VOCAB, 256, 640)
    request = replica.submit(1, [5, 6, 7], 9)
    assert replica.collect(request, 9) == expected(1, 9)
    replica.send(Resume(request=request, sample=0, have=4))
    again = decode(replica.receive(Outputs).payload)
    assert again.first.tolist() == [4] and again.tokens.tolist() == expected(1, 9)[4:]
    replica.send(State(incarnation=2, replicas=1, queued=0, card=joined.card, draining=False))
    assert replica.receive(JoinReplica).holds == [request], "a new broker is told what is held"
    replica.send(Release(requests=[request]))
    replica.send(State(incarnation=3, replicas=1, queued=0, card=joined.card, draining=False))
    assert replica.receive(JoinReplica).holds == []


def test_pings_are_answered_by_the_loop_and_count_what_runs(replica):
    welcome(replica)
    replica.hold.clear()
    replica.submit(1, [5, 6, 7], 9)
    replica.send(Ping(nonce=7, frontend=b"f-1"))
    pong = replica.receive(Pong)
    assert (pong.nonce, pong.frontend, pong.running + pong.waiting, pong.pages) == (7, b"f-1", 1, 40)
    replica.hold.set()


def test_what_cannot_run_is_refused_and_the_rest_goes_on(replica):
    welcome(replica)
    replica.submit(1, [5] * 200, 100)
    refused = replica.receive(Refused)
    assert refused.status == 400 and "300" in refused.reason and "256" in refused.reason
    replica.send(
        Submit(
            frontend=b"f-1",
            request=b"x" * 16,
            first_sample=0,
            sequences=1,
            prompt_tokens=1,
            priority=0,
            page_hashes=b"",
            payload=[b"rubbish"],
        )
    )
    assert replica.receive(Refused).request == b"x" * 16
    replica.broker.send_multipart([replica.identity, b"\xff", b"rubbish"])
    request = replica.submit(2, [5, 6], 3)
    assert replica.collect(request, 3) == expected(2, 3)


def test_a_cancelled_request_gives_its_credit_back(replica):
    welcome(replica)
    replica.hold.clear()
    request = replica.submit(1, [5, 6, 7], 100)
    replica.send(Cancel(request=request, samples=[]))
    outputs = replica.receive(Outputs)
    assert (outputs.finished, outputs.finished_sequences) == ([request], [1])
    replica.hold.set()


def test_a_fenced_replica_starts_over_as_another_epoch(replica):
    joined = welcome(replica)
    replica.hold.clear()
    replica.submit(1, [5, 6, 7], 100)
    replica.send(Fenced(epoch=joined.epoch))
    again = replica.receive(JoinReplica)
    while again.epoch == joined.epoch:
        again = replica.receive(JoinReplica)
    assert again.holds == []
    replica.hold.set()
    request = replica.submit(2, [5, 6], 5)
    assert replica.collect(request, 5) == expected(2, 5)


def test_what_never_came_is_refused_when_it_is_to_be_resumed(replica):
    welcome(replica)
    replica.send(Resume(request=b"y" * 16, sample=3, have=0))
    refused = replica.receive(Refused)
    assert (refused.request, refused.first_sample, refused.status) == (b"y" * 16, 3, 503)


def test_a_silent_broker_is_joined_again(replica):
    first = replica.receive(JoinReplica)
    second = replica.receive(JoinReplica)
    assert first.epoch == second.epoch


def test_a_loop_that_hangs_ends_the_process_with_a_failure(tmp_path):
    replica = Replica(tmp_path, "-c", HANGS)
    try:
        assert replica.process.wait(20) == 1
    finally:
        replica.close()


def test_sigterm_finishes_what_runs(replica):
    welcome(replica)
    replica.hold.clear()
    request = replica.submit(1, [5, 6, 7], 30)
    replica.send(Ping(nonce=1, frontend=b""))
    replica.receive(Pong)
    replica.process.send_signal(signal.SIGTERM)
    while replica.receive(JoinReplica).credits:
        pass
    replica.hold.set()
    assert replica.collect(request, 30) == expected(1, 30)
    assert replica.process.wait(20) == 0
    assert replica.stopped.wait(5), "the stages are told to stop"


def test_a_request_with_a_grammar_waits_until_it_is_compiled_and_nobody_else_does(replica):
    welcome(replica)
    request = replica.submit(1, [5, 6, 7], 4, n=2, grammar="G", grammar_after=9, min_tokens=2, stop_token_ids=[3])
    compile = replica.told_matcher(Compile)
    assert compile.grammar == "G"
    other = replica.submit(2, [5, 6], 3)
    assert replica.collect(other, 3) == expected(2, 3)
    replica.say_as_matcher(Compiled(number=compile.number, error=""))
    first = replica.told_matcher(Constrain)
    assert first.grammars == ["G"] and first.positions.tolist() == [0, 0]
    assert sorted(each.slot for each in first.setups) == sorted(first.slots.tolist())
    for each in first.setups:
        assert (each.grammar, each.grammar_after, each.min_tokens, each.banned_ids, each.outputs) == (0, 9, 2, [3], b"")
    for position in (1, 2, 3):
        following = replica.told_matcher(Constrain)
        assert following.step > first.step and not following.grammars and not following.setups
        assert following.slots.tolist() == first.slots.tolist() and following.positions.tolist() == [position] * 2
    counts = 0
    while counts < 8:
        tokens = decode(replica.receive(Outputs).payload)
        counts += int(tokens.counts.sum())
        assert tokens.requests[:16] == request


def test_a_grammar_that_does_not_compile_is_refused(replica):
    welcome(replica)
    request = replica.submit(1, [5, 6, 7], 4, n=2, grammar="G")
    replica.say_as_matcher(Compiled(number=replica.told_matcher(Compile).number, error="it is bad"))
    refused = replica.receive(Refused)
    assert (refused.request, refused.status, refused.reason, refused.sequences) == (request, 400, "it is bad", 2)
    replica.send(Ping(nonce=1, frontend=b""))
    pong = replica.receive(Pong)
    assert (pong.running, pong.waiting) == (0, 0)
    # One that was cancelled meanwhile is not told of again.
    request = replica.submit(2, [5, 6, 7], 4, grammar="G")
    compile = replica.told_matcher(Compile)
    replica.send(Cancel(request=request, samples=[]))
    assert replica.receive(Outputs).finished == [request]
    replica.say_as_matcher(Compiled(number=compile.number, error="it is bad"))
    other = replica.submit(3, [5, 6], 3)
    assert replica.collect(other, 3) == expected(3, 3)


def test_a_grammar_that_fails_on_the_way_ends_its_request_and_the_matcher_hears_so(replica):
    welcome(replica)
    replica.hold.clear()
    request = replica.submit(1, [5, 6, 7], 50, n=2, grammar="G")
    replica.say_as_matcher(Compiled(number=replica.told_matcher(Compile).number, error=""))
    slot = int(replica.told_matcher(Constrain).slots[0])
    failed = GrammarFailed(slot=slot, reason="no way on")
    for _ in range(2):
        replica.say_as_matcher(failed)
    refused = replica.receive(Refused)
    assert (refused.request, refused.status, refused.reason) == (request, 400, "no way on")
    answers = 0
    while answers < 2:
        _, *frames = replica.matcher.recv_multipart()
        answers += isinstance(message := decode(frames), GrammarFailed) and message.slot == slot
    replica.hold.set()
    other = replica.submit(2, [5, 6], 3)
    assert replica.collect(other, 3) == expected(2, 3)
    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(20) == 0
    replica.told_matcher(Stop)


@pytest.mark.parametrize(
    ("params", "says"),
    [({"grammar": "x" * (1 << 19)}, "characters"), ({"grammar": "G", "grammar_after": VOCAB}, "0..99")],
)
def test_a_grammar_that_can_never_be_is_refused_at_once(replica, params, says):
    welcome(replica)
    replica.submit(1, [5, 6], 4, **params)
    refused = replica.receive(Refused)
    assert refused.status == 400 and says in refused.reason
