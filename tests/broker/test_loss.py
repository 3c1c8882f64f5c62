"""Dead replicas, dead frontends, restarts of the broker, on a simulated clock."""

from __future__ import annotations

import dataclasses

import pytest

from broker.core import FIRST_ANSWER_SECONDS, FRONTEND_GONE_SECONDS, GRACE_SECONDS, REPLICA_DEAD_SECONDS
from tests.support.broker import CARD, Bench, pong, request_id
from toka.messages import Cancel, Fenced, JoinReplica, Lost, Outputs, Ping, Release, Submit


def outputs(frontend: bytes, epoch: int = 1) -> Outputs:
    return Outputs(
        frontend=frontend, epoch=epoch, finished=[], finished_first=[], finished_sequences=[], payload=[b"t"]
    )


def test_a_silent_replica_is_lost_within_two_seconds_and_fenced_if_it_comes_back():
    bench = Bench()
    frontend, dead = bench.join_frontend(b"f-1"), bench.join_replica("r0")
    request = bench.submit(frontend, 1)
    bench.submit(frontend, 1, first=1)
    bench.advance(1.0)
    assert bench.states[frontend].replicas == 1
    bench.take(frontend), bench.take(dead)
    bench.silent.add(dead)
    bench.advance(REPLICA_DEAD_SECONDS + 0.5)
    [lost] = bench.take(frontend)
    assert isinstance(lost, Lost) and lost.requests == [request, request] and sorted(lost.first_samples) == [0, 1]
    assert bench.states[frontend].replicas == 0 and bench.states[frontend].card is None
    bench.take(dead)
    bench.replica(dead, outputs(frontend))
    bench.replica(dead, pong(Ping(nonce=1, frontend=b"")))
    assert bench.take(frontend) == [], "what a dead epoch says is not passed on"
    assert all(isinstance(each, Fenced) and each.epoch == 1 for each in bench.take(dead))
    bench.join_replica("r0", epoch=1)
    assert isinstance(bench.take(dead)[0], Fenced), "it cannot join again as it was"
    bench.submit(frontend, 1)
    new = bench.join_replica("r0", epoch=2)
    assert [type(each) for each in bench.take(new)] == [Submit]


def test_a_replica_that_never_answered_has_longer():
    bench = Bench()
    bench.join_frontend(b"f-1")
    bench.silent.add(bench.join_replica("r0"))
    bench.advance(REPLICA_DEAD_SECONDS + 1)
    assert bench.states[b"f-1"].replicas == 1
    bench.advance(FIRST_ANSWER_SECONDS)
    assert bench.states[b"f-1"].replicas == 0


def test_what_waited_in_a_replaced_connection_is_not_a_peer():
    """libzmq makes up an identity for it (five bytes, the first zero). Seen after 10 s of a stopped broker."""
    bench = Bench()
    frontend, replica = bench.join_frontend(b"f-1"), bench.join_replica("r0")
    request = bench.submit(frontend, 1)
    bench.take(frontend), bench.take(replica)
    card = bench.broker.registry.replicas[replica].card
    stale = JoinReplica(
        replica="r0", epoch=1, credits=64, card=card,
        holds=[request], holds_first=[0], holds_sequences=[1], holds_priorities=[0], holds_frontends=[frontend],
    )  # fmt: skip
    bench.replica(b"\0kE\x8bg", stale)
    bench.join_frontend(b"\0kE\x8bh", holds=[(request, 0)])
    assert not bench.take(frontend) and not bench.take(replica)
    assert list(bench.broker.registry.replicas) == [replica] and list(bench.broker.registry.frontends) == [frontend]
    bench.replica(b"\0kE\x8bg", outputs(frontend))
    assert [type(each) for each in bench.take(frontend)] == [Outputs], "tokens are good whatever way they come"


def test_another_epoch_of_a_name_replaces_the_first_at_once():
    bench = Bench()
    frontend, old = bench.join_frontend(b"f-1"), bench.join_replica("r0", epoch=1)
    request = bench.submit(frontend, 1)
    bench.take(frontend)
    new = bench.join_replica("r0", epoch=2)
    [lost] = bench.take(frontend)
    assert isinstance(lost, Lost) and lost.requests == [request]
    assert isinstance(bench.take(old)[-1], Fenced)
    bench.submit(frontend, 1)
    assert isinstance(bench.take(new)[0], Submit)


def test_a_late_answer_of_another_epoch_is_dropped():
    bench = Bench()
    frontend, replica = bench.join_frontend(b"f-1"), bench.join_replica("r0", epoch=2)
    bench.replica(replica, outputs(frontend, epoch=1))
    assert bench.take(frontend) == []
    bench.replica(replica, outputs(frontend, epoch=2))
    assert len(bench.take(frontend)) == 1


def test_a_shard_that_cannot_be_sent_stays_and_goes_elsewhere():
    bench = Bench()
    frontend = bench.join_frontend(b"f-1")
    gone, good = bench.join_replica("r0", credits=9), bench.join_replica("r1", credits=1)
    bench.unreachable.add(gone)
    for number in range(2):
        bench.submit(frontend, number)
    assert len(bench.take(good)) == 1 and len(bench.broker.queue) == 1
    bench.unreachable.clear()
    bench.advance(0.5)
    assert [type(each) for each in bench.take(gone)] == [Submit]


def test_a_stalled_broker_blames_nobody():
    bench = Bench()
    frontend, replica = bench.join_frontend(b"f-1"), bench.join_replica("r0")
    bench.submit(frontend, 1)
    bench.advance(1.0)
    bench.clock.now += 30.0
    bench.advance(2.0)
    assert bench.states[frontend].replicas == 1
    assert not any(isinstance(each, Lost) for each in bench.take(frontend))
    assert len(bench.broker.registry) == 1 and replica in bench.broker.registry.replicas


def test_a_frontend_that_is_gone_takes_its_shards_along():
    bench = Bench()
    frontend, other = bench.join_frontend(b"f-1"), bench.join_frontend(b"f-2")
    replica = bench.join_replica("r0", credits=1)
    request = bench.submit(frontend, 1)
    bench.submit(frontend, 2)
    bench.submit(other, 3)
    bench.take(replica)
    bench.silent.add(frontend)
    bench.advance(FRONTEND_GONE_SECONDS + 1)
    told = bench.take(replica)
    assert [type(each) for each in told] == [Cancel, Release, Submit]
    assert told[0].request == request and told[2].frontend == other
    assert list(bench.broker.registry.frontends) == [other]


def test_after_a_restart_what_both_hold_goes_on_within_its_credits():
    bench = Bench(incarnation=2)
    held = request_id(1)
    replica = bench.join_replica("r0", credits=4, holds=[(held, 0, 3, b"f-1")])
    bench.replica(replica, outputs(b"f-1"))
    assert len(bench.take(b"f-1")) == 1
    frontend = bench.join_frontend(b"f-1", holds=[(held, 0)])
    assert bench.states[frontend].incarnation == bench.states[replica].incarnation == 2
    bench.submit(frontend, 2, sequences=2)
    assert bench.take(replica) == [], "3 of 4 credits are taken"
    shard = Submit(frontend=frontend, request=held, first_sample=0, sequences=3, prompt_tokens=1, priority=0,
                   page_hashes=b"", payload=[])  # fmt: skip
    bench.finish(replica, 1, shard, sequences=1)
    assert [type(each) for each in bench.take(replica)] == [Submit]
    bench.advance(GRACE_SECONDS + 1)
    assert not any(isinstance(each, Lost) for each in bench.take(frontend))


@pytest.mark.parametrize("replica_first", [True, False])
def test_after_a_restart_what_only_a_replica_holds_is_dropped_there(replica_first: bool):
    bench = Bench(incarnation=2)
    wanted, unwanted = request_id(1), request_id(2)
    holds = [(wanted, 0, 1, b"f-1"), (unwanted, 0, 1, b"f-1"), (wanted, 4, 0, b"f-1")]

    def replica() -> bytes:
        return bench.join_replica("r0", holds=holds)

    if replica_first:
        identity = replica()
    bench.join_frontend(b"f-1", holds=[(wanted, 0)])
    if not replica_first:
        identity = replica()
    told = bench.take(identity)
    assert [type(each) for each in told] == [Cancel, Release]
    assert told[0].request == unwanted
    assert len(bench.broker.registry) == 2
    bench.frontend(b"f-1", Release(requests=[wanted]))
    assert bench.broker.idle


def test_after_a_restart_what_only_a_frontend_holds_is_lost_when_the_grace_is_over():
    bench = Bench(incarnation=2)
    frontend = bench.join_frontend(b"f-1", holds=[(request_id(1), 0), (request_id(2), 0), (request_id(3), 8)])
    replica = bench.join_replica("r0", holds=[(request_id(1), 0, 1, frontend)])
    bench.frontend(frontend, Release(requests=[request_id(2)]))
    bench.submit(frontend, 9)
    assert bench.take(replica) == [], "nothing is dispatched before"
    bench.advance(GRACE_SECONDS - 0.5)
    assert not any(isinstance(each, Lost) for each in bench.take(frontend))
    bench.advance(1.0)
    [lost] = bench.take(frontend)
    assert isinstance(lost, Lost) and (lost.requests, lost.first_samples) == ([request_id(3)], [8])
    assert [type(each) for each in bench.take(replica)] == [Submit]


def test_a_fresh_start_waits_for_no_grace():
    bench = Bench()
    frontend = bench.join_frontend(b"f-1")
    bench.submit(frontend, 1)
    replica = bench.join_replica("r0")
    assert [type(each) for each in bench.take(replica)] == [Submit]


def test_a_replica_that_joins_after_its_shards_were_submitted_again_drops_them():
    bench = Bench(incarnation=2)
    frontend = bench.join_frontend(b"f-1", holds=[(request_id(1), 0)])
    bench.advance(GRACE_SECONDS + 0.5)
    assert isinstance(bench.take(frontend)[0], Lost)
    bench.submit(frontend, 1)
    first = bench.join_replica("r0")
    late = bench.join_replica("r1", holds=[(request_id(1), 0, 1, frontend)])
    assert [type(each) for each in bench.take(first)] == [Submit]
    assert [type(each) for each in bench.take(late)] == [Cancel, Release]


def test_a_frontend_that_never_comes_back_after_a_restart_is_expired():
    bench = Bench(incarnation=2)
    bench.silent.add(b"f-gone")
    replica = bench.join_replica("r0", credits=1, holds=[(request_id(1), 0, 1, b"f-gone")])
    frontend = bench.join_frontend(b"f-1")
    bench.submit(frontend, 2)
    bench.advance(FRONTEND_GONE_SECONDS + 1)
    assert [type(each) for each in bench.take(replica)] == [Cancel, Release, Submit]


def test_a_peer_that_does_not_know_of_the_restart_is_told():
    bench = Bench(incarnation=2)
    bench.replica(b"m-r0-1", pong(Ping(nonce=1, frontend=b"")))
    assert bench.states[b"m-r0-1"].incarnation == 2


def test_a_shard_that_comes_twice_replaces_the_first():
    bench = Bench()
    frontend, replica = bench.join_frontend(b"f-1"), bench.join_replica("r0", credits=3)
    bench.submit(frontend, 1, sequences=2, payload=b"first")
    neighbour = bench.submit(frontend, 1, first=2, sequences=1)
    bench.take(replica), bench.take(frontend)
    bench.submit(frontend, 1, sequences=2, payload=b"second")
    cancel, release, submit = bench.take(replica)
    assert isinstance(cancel, Cancel) and isinstance(release, Release)
    assert isinstance(submit, Submit) and submit.payload == [b"second"]
    [lost, _] = bench.take(frontend)
    assert isinstance(lost, Lost) and (lost.requests, lost.first_samples) == ([neighbour], [2])
    bench.submit(frontend, 1, first=2, sequences=1)
    bench.take(replica)
    bench.submit(frontend, 5, sequences=2, payload=b"waits")
    bench.submit(frontend, 5, sequences=1, payload=b"waits instead")
    assert len(bench.broker.queue) == 1
    bench.finish(replica, 1, submit, sequences=1)
    [waited] = bench.take(replica)
    assert waited.payload == [b"waits instead"]


def test_replicas_of_unequal_limits_serve_the_narrowest_and_another_model_is_turned_away():
    bench = Bench()
    bench.join_frontend(b"f-1")
    bench.join_replica("r0")
    bench.join_replica("r1", card=dataclasses.replace(CARD, kv_cache_tokens=64))
    card = bench.states[b"f-1"].card
    assert card is not None and (card.kv_cache_tokens, card.context_length) == (64, 128)
    other = bench.join_replica("r2", card=dataclasses.replace(CARD, name="another"))
    assert bench.take(other) == [] and other not in bench.states
    assert bench.states[b"f-1"].replicas == 2
