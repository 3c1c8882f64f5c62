"""Queueing, credits and routing, on a simulated clock."""

from __future__ import annotations

import random

from tests.support.broker import Bench, pong, request_id
from toka.messages import Accepted, Cancel, Fenced, Outputs, Ping, Refused, Release, Resume, Submit


def ready(credits: int = 64, replicas: int = 1, **limits: int) -> tuple[Bench, bytes, list[bytes]]:
    bench = Bench(**limits)
    names = [bench.join_replica(f"r{i}", credits=credits) for i in range(replicas)]
    return bench, bench.join_frontend(b"f-1"), names


def submits(bench: Bench, replica: bytes) -> list[Submit]:
    return [each for each in bench.take(replica) if isinstance(each, Submit)]


def numbers(shards: list[Submit]) -> list[int]:
    return [int.from_bytes(each.request, "little") for each in shards]


def test_a_shard_goes_to_a_replica_and_its_outputs_come_back_undecoded():
    bench, frontend, [replica] = ready()
    request = bench.submit(frontend, 7, payload=b"not a message")
    [accepted] = bench.take(frontend)
    assert isinstance(accepted, Accepted) and accepted.request == request
    [shard] = submits(bench, replica)
    assert shard.payload == [b"not a message"]
    bench.finish(replica, 1, shard)
    [outputs] = bench.take(frontend)
    assert isinstance(outputs, Outputs) and outputs.payload == [b"tokens", b"more"]


def test_dispatch_stays_within_credits_and_goes_on_as_they_come_back():
    bench, frontend, [replica] = ready(credits=4)
    for number in range(10):
        bench.submit(frontend, number, sequences=2)
    first = submits(bench, replica)
    assert numbers(first) == [0, 1]
    bench.finish(replica, 1, first[0], sequences=1)
    assert submits(bench, replica) == []
    bench.finish(replica, 1, first[0], sequences=1)
    assert numbers(submits(bench, replica)) == [2]
    bench.frontend(frontend, Release(requests=[first[1].request]))
    assert numbers(submits(bench, replica)) == [3], "a release gives back what had not ended"


def test_order_is_first_in_first_out_within_priority():
    bench, frontend, [replica] = ready(credits=1)
    bench.submit(frontend, 0)
    for number, priority in enumerate([5, 0, 5, -1, 0], start=1):
        bench.submit(frontend, number, priority=priority)
    order = []
    while shards := submits(bench, replica):
        order += numbers(shards)
        for each in shards:
            bench.finish(replica, 1, each)
    assert order == [0, 4, 2, 5, 1, 3]


def test_the_urgent_do_not_wait_for_credits_of_the_less_urgent():
    """Up to as many again: a manager has room for so many, and preempts for them."""
    bench, frontend, [replica] = ready(credits=4)
    for number in range(6):
        bench.submit(frontend, number, priority=7)
    for number in range(6, 12):
        bench.submit(frontend, number, priority=number % 2)
    bench.submit(frontend, 12, priority=7)
    first = submits(bench, replica)
    assert numbers(first) == [0, 1, 2, 3, 6, 7, 8, 9], "four of the less urgent, then four of the urgent"
    for each in first[:4]:
        bench.finish(replica, 1, each)
    assert numbers(submits(bench, replica)) == [10], "those of priority 1 wait for what is as urgent"
    bench.finish(replica, 1, first[4])
    assert numbers(submits(bench, replica)) == []
    bench.finish(replica, 1, first[5])
    assert numbers(submits(bench, replica)) == [11]


def test_a_full_queue_takes_an_urgent_one_that_need_not_wait():
    bench = Bench(queue_requests=2)
    frontend, replica = bench.join_frontend(b"f-1"), bench.join_replica("r0", credits=2)
    for number in range(5):
        bench.submit(frontend, number, priority=7)
    assert [type(each) for each in bench.take(frontend)] == [Accepted] * 4 + [Refused]
    bench.submit(frontend, 5, priority=0)
    assert [type(each) for each in bench.take(frontend)] == [Accepted]
    assert numbers(submits(bench, replica)) == [0, 1, 5]


def test_a_shard_wider_than_all_credits_runs_when_a_replica_is_empty():
    bench, frontend, [replica] = ready(credits=4)
    bench.submit(frontend, 0, sequences=1)
    bench.submit(frontend, 1, sequences=100)
    bench.submit(frontend, 2, sequences=1)
    [small] = submits(bench, replica)
    bench.finish(replica, 1, small)
    [wide] = submits(bench, replica)
    assert wide.sequences == 100
    bench.finish(replica, 1, wide, sequences=97)
    assert numbers(submits(bench, replica)) == [2]


def test_replicas_share_the_load_by_free_credits():
    bench, frontend, replicas = ready(credits=8, replicas=4)
    for number in range(16):
        bench.submit(frontend, number)
    assert [len(submits(bench, replica)) for replica in replicas] == [4, 4, 4, 4]


def test_a_full_queue_refuses_by_number_and_by_bytes():
    bench, frontend, [replica] = ready(credits=1, queue_requests=3)
    for number in range(6):
        bench.submit(frontend, number)
    refused = [each for each in bench.take(frontend) if isinstance(each, Refused)]
    assert [int.from_bytes(each.request, "little") for each in refused] == [4, 5]
    assert {each.status for each in refused} == {429} and all(each.retry_after >= 1 for each in refused)

    bench, frontend, [replica] = ready(credits=1, queue_bytes=3000)
    for number in range(4):
        bench.submit(frontend, number, payload=bytes(1400))
    refused = [each for each in bench.take(frontend) if isinstance(each, Refused)]
    assert [int.from_bytes(each.request, "little") for each in refused] == [3]
    [first] = submits(bench, replica)
    bench.finish(replica, 1, first)
    bench.submit(frontend, 9, payload=bytes(1400))
    assert all(not isinstance(each, Refused) for each in bench.take(frontend)), "what left made room"


def test_a_shard_that_need_not_wait_needs_no_place_in_the_queue():
    bench, frontend, [replica] = ready(queue_bytes=10)
    bench.submit(frontend, 0, payload=bytes(1000))
    assert len(submits(bench, replica)) == 1


def test_retry_after_follows_the_rate_at_which_the_queue_drains():
    def refusal(per_tick: int) -> int:
        bench, frontend, [replica] = ready(credits=per_tick, queue_requests=1000)
        for number in range(1000 + per_tick):
            bench.submit(frontend, number)
        number = 2000
        for _ in range(80):
            for shard in submits(bench, replica):
                bench.finish(replica, 1, shard)
                bench.submit(frontend, number := number + 1)
            bench.advance(0.25)
        bench.take(frontend)
        while not isinstance((bench.take(frontend) or [None])[-1], Refused):
            bench.submit(frontend, number := number + 1)
            last = bench.sent[frontend][-1]
            if isinstance(last, Refused):
                return last.retry_after
        raise AssertionError

    fast, slow = refusal(25), refusal(1)
    assert fast in (1, 2), "100 a second leave: a tenth of 1,000 in about 1 s"
    assert 20 <= slow <= 30, "4 a second leave: a tenth of 1,000 in 25 s"


def test_cancel_drops_what_waits_and_follows_what_was_dispatched():
    bench, frontend, [replica] = ready(credits=1)
    running, waiting = bench.submit(frontend, 0), bench.submit(frontend, 1)
    bench.take(replica)
    for request in (running, waiting):
        bench.frontend(frontend, Cancel(request=request, samples=[]))
    [cancel] = bench.take(replica)
    assert isinstance(cancel, Cancel) and cancel.request == running
    assert len(bench.broker.queue) == 0


def test_samples_cancelled_while_they_wait_are_cancelled_when_they_start():
    bench, frontend, [replica] = ready(credits=4)
    bench.submit(frontend, 0, sequences=4)
    waiting = bench.submit(frontend, 1, sequences=4)
    bench.frontend(frontend, Cancel(request=waiting, samples=[2]))
    [first] = bench.take(replica)
    assert isinstance(first, Submit)
    bench.finish(replica, 1, first)
    second, cancel = bench.take(replica)
    assert isinstance(second, Submit) and isinstance(cancel, Cancel) and cancel.samples == [2]


def test_resume_reaches_the_replica_that_holds_the_sample():
    bench, frontend, [left, right] = ready(credits=4, replicas=2)
    request = bench.submit(frontend, 0, first=0, sequences=4)
    bench.submit(frontend, 0, first=4, sequences=4)
    [low], [high] = submits(bench, left), submits(bench, right)
    assert (low.first_sample, high.first_sample) == (0, 4)
    bench.frontend(frontend, Resume(request=request, sample=5, have=2))
    assert bench.take(left) == []
    [resume] = bench.take(right)
    assert isinstance(resume, Resume) and resume.sample == 5


def test_a_submit_in_anothers_name_is_dropped():
    bench, frontend, [replica] = ready()
    other = bench.join_frontend(b"f-2")
    forged = Submit(
        frontend=frontend, request=request_id(1), first_sample=0, sequences=1, prompt_tokens=1, priority=0,
        page_hashes=b"", payload=[],
    )  # fmt: skip
    bench.frontend(other, forged)
    assert bench.take(replica) == []
    bench.submit(frontend, 2)
    bench.submit(other, 2)
    bench.frontend(other, Cancel(request=request_id(2), samples=[]))
    bench.frontend(other, Release(requests=[request_id(2)]))
    assert len(bench.take(replica)) == 1, "only its own frontend reaches a request"


def test_nonsense_is_dropped():
    bench, frontend, [replica] = ready()
    bench.submit(frontend, 1, sequences=0)
    bench.submit(frontend, 1, priority=1 << 31)
    bench.submit(frontend, 1, first=-1)
    bench.frontend(frontend, Fenced(epoch=1))
    bench.replica(replica, Cancel(request=request_id(1), samples=[]))
    assert bench.take(replica) == [] and bench.take(frontend) == []


def test_health_checks_ask_every_manager_and_come_back():
    bench, frontend, replicas = ready(replicas=2)
    bench.frontend(frontend, Ping(nonce=5, frontend=frontend))
    for replica in replicas:
        [ping] = bench.take(replica)
        assert isinstance(ping, Ping)
        bench.replica(replica, pong(ping))
    assert [each.nonce for each in bench.take(frontend)] == [5, 5]


def test_a_managers_refusal_reaches_the_frontend_and_gives_credits_back():
    bench, frontend, [replica] = ready(credits=1)
    request = bench.submit(frontend, 0)
    bench.submit(frontend, 1)
    bench.take(frontend), bench.take(replica)
    refusal = Refused(
        frontend=frontend, request=request, first_sample=0, sequences=1, status=400, reason="too long", retry_after=0
    )
    bench.replica(replica, refusal)
    [told] = bench.take(frontend)
    assert isinstance(told, Refused) and told.reason == "too long"
    assert numbers(submits(bench, replica)) == [1]


def test_a_replica_that_does_not_have_what_it_should_resume_loses_the_shard():
    bench, frontend, [replica] = ready(credits=200)
    request = bench.submit(frontend, 0, sequences=64)
    bench.take(frontend), bench.take(replica)
    refusal = Refused(
        frontend=b"", request=request, first_sample=9, sequences=1, status=503, reason="unknown", retry_after=0
    )
    bench.replica(replica, refusal)
    [told] = bench.take(frontend)
    assert isinstance(told, Refused)
    assert (told.frontend, told.first_sample, told.status) == (frontend, 0, 503)
    assert bench.broker.registry.shard(request, 0) is None


def test_a_draining_broker_refuses_and_finishes_what_it_has():
    bench, frontend, [replica] = ready(credits=1)
    for number in range(2):
        bench.submit(frontend, number)
    bench.broker.drain()
    bench.take(frontend)
    bench.submit(frontend, 2)
    [refused] = bench.take(frontend)
    assert isinstance(refused, Refused) and refused.status == 503
    assert bench.states[frontend].draining
    while shards := submits(bench, replica):
        bench.finish(replica, 1, shards[0])
        bench.frontend(frontend, Release(requests=[shards[0].request]))
    assert bench.broker.idle


def test_a_draining_replica_gets_nothing_new():
    bench, frontend, [replica] = ready()
    bench.join_replica("r0", credits=0)
    bench.submit(frontend, 0)
    assert bench.take(replica) == []
    assert bench.states[frontend].replicas == 0


def test_ten_thousand_requests_over_a_hundred_replicas_leave_no_trace():
    bench, _, replicas = ready(credits=3, replicas=100)
    fronts = [bench.join_frontend(b"f-%d" % i) for i in range(4)]
    draw = random.Random(0)
    for number in range(10_000):
        bench.submit(draw.choice(fronts), number, sequences=draw.choice([1, 1, 1, 2, 5]))
    done = 0
    while done < 10_000:
        for replica in replicas:
            for shard in submits(bench, replica):
                if draw.random() < 0.1:
                    bench.frontend(shard.frontend, Cancel(request=shard.request, samples=[]))
                else:
                    bench.finish(replica, 1, shard)
                bench.frontend(shard.frontend, Release(requests=[shard.request]))
                done += 1
    assert bench.broker.idle and len(bench.broker.queue) == 0 and bench.broker.queue.bytes == 0
    assert not bench.broker.registry._shards and not bench.broker.queue._levels
    assert all(not each.used and not each.shards for each in bench.broker.registry.replicas.values())
