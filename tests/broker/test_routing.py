"""Which replica a shard goes to: by load, and by the pages of its prompt that are there."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import pytest

from broker.prefixes import Prefixes
from broker.registry import Replica
from tests.support.broker import CARD, Bench, prompt_keys, request_id
from toka.messages import Cancel, Frame, Message, Release, Submit, decode

PAGES = 64
"""Of a prompt: 1,024 tokens."""
LARGE = dataclasses.replace(CARD, kv_cache_tokens=16 * PAGES * CARD.page_size)
"""A replica that has room for 16 prompts."""


class Watched(Bench):
    """Checks each dispatch: none queues where another replica would run it at once."""

    queued = 0

    def _deliver(self, identity: bytes, frames: Sequence[Frame]) -> bool:
        message = decode(frames)
        if isinstance(message, Submit):
            self.check(self.broker.registry.replicas[identity], message)
        return super()._deliver(identity, frames)

    def check(self, chosen: Replica, shard: Submit) -> None:
        others = self.broker.registry.replicas.values()
        assert not chosen.used or chosen.used + shard.sequences <= chosen.credits
        if queues(chosen, shard):
            self.queued += 1
            assert all(queues(each, shard) for each in others if each.reachable), "one idles while another queues"


def queues(replica: Replica, shard: Submit) -> bool:
    return replica.used > 0 and replica.used + shard.sequences > replica.credits // 2


def cluster(replicas: int, credits: int) -> tuple[Watched, bytes, list[bytes]]:
    bench = Watched()
    names = [bench.join_replica(f"r{number}", credits=credits, card=LARGE) for number in range(replicas)]
    return bench, bench.join_frontend(b"f-1"), names


def taken(bench: Bench, replicas: Sequence[bytes]) -> list[int]:
    """Shards that each replica was sent since the last call."""
    return [sum(isinstance(each, Submit) for each in bench.take(replica)) for replica in replicas]


def test_a_shard_goes_where_its_prompt_is_and_where_it_is_on_its_way():
    bench, frontend, replicas = cluster(3, credits=64)
    bench.publish(replicas[1], prompt_keys(7, PAGES))
    bench.submit(frontend, 0, keys=prompt_keys(7, PAGES))
    assert taken(bench, replicas) == [0, 1, 0]
    bench.submit(frontend, 1, keys=prompt_keys(8, PAGES))
    bench.submit(frontend, 2, keys=prompt_keys(8, PAGES))
    assert taken(bench, replicas) == [2, 0, 0], "nothing was published, but the first is there already"


def test_more_of_a_prompt_counts_for_more_and_few_pages_break_a_tie():
    bench, frontend, replicas = cluster(3, credits=64)
    bench.publish(replicas[1], prompt_keys(0, PAGES)[:1])
    bench.publish(replicas[2], prompt_keys(0, PAGES)[:20])
    bench.submit(frontend, 0, keys=prompt_keys(0, PAGES))
    bench.submit(frontend, 1, keys=prompt_keys(0, 1))
    assert taken(bench, replicas) == [0, 1, 1], "a sequence more weighs more than one page"


def test_pages_after_one_that_is_missing_are_of_no_use():
    bench, frontend, replicas = cluster(2, credits=64)
    bench.publish(replicas[1], prompt_keys(0, PAGES))
    bench.publish(replicas[1], evicted=prompt_keys(0, PAGES)[:1])
    bench.submit(frontend, 0, keys=prompt_keys(0, PAGES))
    assert taken(bench, replicas) == [1, 0]


def test_a_prefix_is_worth_only_so_much_load():
    bench, frontend, replicas = cluster(2, credits=64)
    for number in range(6):
        bench.submit(frontend, number, keys=prompt_keys(0, 16))
    assert taken(bench, replicas) == [5, 1], "256 tokens are worth four sequences"
    for number in range(6, 20):
        bench.submit(frontend, number, keys=prompt_keys(0, 16))
    assert taken(bench, replicas) == [5, 9], "now both have it"


def test_a_long_prefix_is_worth_an_eighth_of_the_credits_at_most():
    bench, frontend, replicas = cluster(2, credits=64)
    for number in range(10):
        bench.submit(frontend, number, keys=prompt_keys(0, PAGES))
    assert taken(bench, replicas) == [9, 1]


def test_a_replica_that_is_gone_has_nothing_and_tells_all_when_it_joins_again():
    bench, frontend, replicas = cluster(2, credits=64)
    bench.publish(replicas[1], prompt_keys(0, PAGES))
    again = bench.join_replica("r1", epoch=2, credits=64, card=LARGE)
    bench.submit(frontend, 0, keys=prompt_keys(0, PAGES))
    assert taken(bench, [replicas[0], again]) == [1, 0]
    bench.publish(again, prompt_keys(1, PAGES), whole=True)
    bench.submit(frontend, 1, keys=prompt_keys(1, PAGES))
    assert taken(bench, [replicas[0], again]) == [0, 1]
    bench.publish(again, prompt_keys(2, PAGES), whole=True)
    bench.submit(frontend, 2, keys=prompt_keys(1, PAGES))
    assert taken(bench, [replicas[0], again]) == [1, 0], "what it does not tell of any more is gone"


def test_hashes_that_are_no_keys_are_dropped_with_their_message():
    bench, frontend, replicas = cluster(1, credits=64)
    bench.submit(frontend, 0, keys=[b"short"])
    assert taken(bench, replicas) == [0]


def test_a_set_of_pages_is_bounded_and_forgets_children_first():
    prefixes = Prefixes(6)
    first, second = prompt_keys(0, 4), prompt_keys(1, 4)
    prefixes.add(first)
    prefixes.add(second)
    assert len(prefixes) == 6 and prefixes.match(second) == 4 and prefixes.match(first) == 2
    prefixes.add(first[:2])
    prefixes.add(prompt_keys(2, 3))
    assert prefixes.match(first) == 2 and prefixes.match(second) == 1, "what was asked for again stays"
    prefixes.remove(first)
    assert prefixes.match(first) == 0 and prefixes.match([]) == 0


def test_a_replica_of_fewer_sequences_gets_fewer():
    bench = Watched()
    small, large = bench.join_replica("r0", credits=16), bench.join_replica("r1", credits=48)
    frontend = bench.join_frontend(b"f-1")
    for number in range(32):
        bench.submit(frontend, number)
    assert taken(bench, [small, large]) == [8, 24]


def test_a_group_is_told_to_spread_where_there_are_others():
    bench = Bench()
    bench.join_frontend(b"f-1")
    bench.join_replica("r0", credits=200)
    bench.advance(0.25)
    assert bench.states[b"f-1"].share == 0
    bench.join_replica("r1", credits=32)
    bench.join_replica("r2", credits=0)
    assert bench.states[b"f-1"].share == 16, "what the smaller one runs at once; one that drains runs nothing new"


class Cached:
    """What a simulated replica really has in its cache: the last 16 prompts."""

    def __init__(self, bench: Bench, identity: bytes) -> None:
        self.bench, self.identity = bench, identity
        self.prompts: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self.running: list[Submit] = []
        self.hits = self.misses = 0

    def take(self) -> None:
        for message in self.bench.take(self.identity):
            if isinstance(message, Submit):
                self.running.append(message)
                self.look_up(message.page_hashes)

    def look_up(self, prompt: bytes) -> None:
        self.hits += prompt in self.prompts
        self.misses += prompt not in self.prompts
        new = [] if prompt in self.prompts else [prompt[at : at + 16] for at in range(0, len(prompt), 16)]
        gone = self.prompts.popitem(last=False)[1] if new and len(self.prompts) == 16 else []
        self.prompts.setdefault(prompt, new)
        self.prompts.move_to_end(prompt)
        self.bench.publish(self.identity, new, gone)


@pytest.mark.parametrize("busy", [0.25, 0.5, 0.9])
def test_prompts_stay_where_they_are_while_load_allows(busy: float):
    """64 prompts, 50 requests each, in random order; no replica has room for more than a quarter of the prompts."""
    bench, frontend, names = cluster(8, credits=64)
    replicas = [Cached(bench, name) for name in names]
    draw = Random(0)
    requests = [number % 64 for number in range(64 * 50)]
    draw.shuffle(requests)
    for number, prompt in enumerate(requests):
        bench.submit(frontend, number, keys=prompt_keys(prompt, PAGES, shared=2))
        for each in replicas:
            each.take()
        while sum(len(each.running) for each in replicas) > busy * 8 * 32:
            each = draw.choice([each for each in replicas if each.running])
            ended = each.running.pop(draw.randrange(len(each.running)))
            bench.finish(each.identity, 1, ended)
    hits, misses = sum(each.hits for each in replicas), sum(each.misses for each in replicas)
    assert hits + misses == len(requests)
    assert hits >= 0.8 * len(requests)
    assert max(each.hits + each.misses for each in replicas) < 1.5 * len(requests) / 8


def test_no_replica_idles_while_another_queues():
    """Shards of many sizes and few prompts, from a trickle to more than all can hold; ends come at random."""
    bench, frontend, replicas = cluster(7, credits=32)
    draw = Random(0)
    running: list[tuple[bytes, Submit]] = []
    for number in range(6_000):
        size = draw.choice([1, 1, 1, 2, 4, 16])
        bench.submit(frontend, number, sequences=size, keys=prompt_keys(draw.randrange(4), PAGES))
        running += new_of(bench, replicas)
        while running and draw.random() < (0.35, 0.55, 0.45)[number // 2_000]:
            replica, shard = running.pop(draw.randrange(len(running)))
            bench.finish(replica, 1, shard)
            running += new_of(bench, replicas)
    assert bench.queued > 100, "there were times when all were full"


def new_of(bench: Bench, replicas: Sequence[bytes]) -> list[tuple[bytes, Submit]]:
    return [(replica, each) for replica in replicas for each in bench.take(replica) if isinstance(each, Submit)]


def test_ten_thousand_requests_over_a_thousand_replicas_leave_no_trace():
    """All prompts begin alike, so that every replica has a part of each."""
    bench = Bench()
    frontend = bench.join_frontend(b"f-1")
    replicas = [bench.join_replica(f"r{number}", credits=32, card=LARGE) for number in range(1_000)]
    draw = Random(0)
    for number in range(10_000):
        bench.submit(frontend, number, keys=prompt_keys(number % 500, PAGES, shared=8))
    registry = bench.broker.registry
    assert max(each.used for each in registry.replicas.values()) <= 16
    for replica in replicas:
        for message in bench.take(replica):
            end(bench, replica, message, draw)
    assert bench.broker.idle and not bench.broker.queue.bytes and not registry._shards
    assert not any(each.used or each.shards for each in registry.replicas.values())


def end(bench: Bench, replica: bytes, message: Message, draw: Random) -> None:
    assert isinstance(message, Submit)
    if draw.random() < 0.5:
        bench.frontend(message.frontend, Cancel(request=message.request, samples=[]))
    else:
        bench.finish(replica, 1, message)
    bench.frontend(message.frontend, Release(requests=[message.request]))


def test_what_waits_keeps_its_hashes_until_it_goes():
    bench, frontend, [replica] = cluster(1, credits=1)
    keys = prompt_keys(0, PAGES)
    bench.submit(frontend, 0, keys=keys)
    bench.submit(frontend, 1, keys=keys)
    waiting = bench.broker.registry.shard(request_id(1), 0)
    assert waiting is not None and waiting.page_hashes == b"".join(keys)
    [first] = new_of(bench, [replica])
    bench.finish(replica, 1, first[1])
    assert not waiting.page_hashes and not bench.broker.queue.bytes
