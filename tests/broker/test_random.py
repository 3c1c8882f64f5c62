"""Random traffic, deaths and restarts: every request completes, credits are kept, and no table keeps anything."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from broker.core import FIRST_ANSWER_SECONDS, GRACE_SECONDS
from broker.policy import OVERDRAFT
from tests.support.broker import CARD, Bench, prompt_keys
from tests.support.soak import examples
from toka.messages import Cancel, Fenced, Lost, Outputs, Refused, Release, Submit

REQUESTS = 40
PROMPTS = 5
PAGES = 90
"""Of a prompt; a replica has room for fewer than three of them."""
Key = tuple[bytes, int]


class World:
    """Frontends and replicas that keep the protocol, in front of and behind one broker."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.bench = Bench(queue_requests=draw.choice([8, 1000]))
        self.waiting: dict[bytes, dict[Key, set[int]]] = {b"f-1": {}, b"f-2": {}}
        """By frontend: the shards of its requests and their samples that have not ended."""
        self.refused: list[tuple[bytes, Key]] = []
        self.twice = draw.random() < 0.5
        """Whether frontends submit shards again that the broker has already."""
        self.held: dict[bytes, dict[Key, tuple[set[int], bytes, int]]] = {}
        """By replica: its shards' samples that have not ended, and the frontend."""
        self.names: dict[bytes, tuple[str, int, int]] = {}
        self.epoch = self.number = 0
        self.bench.holds_of = self.holds_of
        for frontend in self.waiting:
            self.bench.join_frontend(frontend)
        for name in ("r0", "r1"):
            self.start(name)

    def holds_of(self, frontend: bytes) -> list[Key]:
        return [key for key, left in self.waiting[frontend].items() if left]

    def start(self, name: str) -> None:
        self.epoch += 1
        credits = self.draw.choice([1, 4, 16])
        identity = b"m-%s-%x" % (name.encode(), self.epoch)
        self.names[identity], self.held[identity] = (name, self.epoch, credits), {}
        self.bench.join_replica(name, self.epoch, credits)

    def request(self) -> None:
        frontend = self.draw.choice(list(self.waiting))
        self.number += 1
        for first in range(0, self.draw.choice([8, 8, 24]), 8):
            key = (self.number.to_bytes(16, "little"), first)
            self.waiting[frontend][key] = set(range(first, first + self.draw.randint(1, 8)))
            self.submit(frontend, key)

    def submit(self, frontend: bytes, key: Key) -> None:
        if not self.twice and (frontend, key) in self.refused:
            self.refused.remove((frontend, key))
        samples = self.waiting[frontend][key]
        self.bench.submit(
            frontend,
            int.from_bytes(key[0], "little"),
            first=key[1],
            sequences=len(samples),
            priority=self.draw.randint(0, 2),
            payload=bytes(samples),
            keys=prompt_keys(key[0][0] % PROMPTS, PAGES),
        )

    def cancel(self) -> None:
        frontend = self.draw.choice(list(self.waiting))
        if self.waiting[frontend]:
            request, _ = self.draw.choice(list(self.waiting[frontend]))
            self.bench.frontend(frontend, Cancel(request=request, samples=[]))
            self.release(frontend, request)

    def release(self, frontend: bytes, request: bytes) -> None:
        for key in [key for key in self.waiting[frontend] if key[0] == request]:
            del self.waiting[frontend][key]
        self.bench.frontend(frontend, Release(requests=[request]))

    def step(self) -> None:
        """A replica ends some sequences."""
        replica = self.draw.choice(list(self.held))
        if not self.held[replica]:
            return
        key = self.draw.choice(list(self.held[replica]))
        left, frontend, _ = self.held[replica][key]
        ended = {sample for sample in left if self.draw.random() < 0.5}
        left -= ended
        outputs = Outputs(
            frontend=frontend,
            epoch=self.names[replica][1],
            finished=[key[0]],
            finished_first=[key[1]],
            finished_sequences=[len(ended)],
            payload=[bytes(ended)],
        )
        self.bench.replica(replica, outputs)

    def publish(self) -> None:
        """A replica tells of pages, true or not."""
        prompts = self.draw.sample(range(PROMPTS), 2)
        inserted, evicted = (prompt_keys(prompt, self.draw.randint(0, PAGES)) for prompt in prompts)
        self.bench.publish(self.draw.choice(list(self.held)), inserted, evicted, whole=self.draw.random() < 0.3)

    def kill_replica(self) -> None:
        """It dies, and its successor joins before or after the broker has noticed."""
        replica = self.draw.choice(list(self.held))
        name = self.names[replica][0]
        del self.held[replica]
        self.bench.silent.add(replica)
        if self.draw.random() < 0.5:
            self.pass_time(FIRST_ANSWER_SECONDS + 0.5)
        self.start(name)

    def kill_broker(self) -> None:
        """Another incarnation begins; everyone joins it in some order, maybe late."""
        self.deliver()
        bench = Bench(self.bench.queue_requests, clock=self.bench.clock, incarnation=self.bench.incarnation + 1)
        bench.silent, bench.holds_of = self.bench.silent, self.holds_of
        self.bench = bench
        peers = [*self.waiting, *self.held]
        self.draw.shuffle(peers)
        for peer in peers:
            if peer in self.waiting:
                bench.join_frontend(peer, self.holds_of(peer))
            else:
                name, epoch, credits = self.names[peer]
                holds = [(*key, len(left), *told) for key, (left, *told) in self.held[peer].items()]
                bench.join_replica(name, epoch, credits, holds)
            if self.draw.random() < 0.3:
                self.pass_time(1.0)
        self.pass_time(GRACE_SECONDS)

    def pass_time(self, seconds: float) -> None:
        self.deliver()
        self.bench.advance(seconds)

    def deliver(self) -> None:
        """Frontends and replicas take in what was sent to them."""
        while any(self.bench.sent.get(each) for each in (*self.waiting, *self.held)):
            for replica in list(self.held):
                for message in self.bench.take(replica):
                    self.at_replica(replica, message)
            for frontend in self.waiting:
                for message in self.bench.take(frontend):
                    self.at_frontend(frontend, message)
        self.check()

    def at_replica(self, replica: bytes, message: object) -> None:
        held = self.held[replica]
        match message:
            case Submit():
                samples = {sample for frame in message.payload for sample in bytes(frame)}
                held[message.request, message.first_sample] = (samples, message.frontend, message.priority)
            case Cancel(request=request, samples=cancelled):
                for key in [key for key in held if key[0] == request]:
                    held[key][0].difference_update(cancelled or list(held[key][0]))
            case Release(requests=requests):
                for key in [key for key in held if key[0] in requests]:
                    del held[key]
            case Fenced():
                raise AssertionError("a replica that answers was declared dead")

    def at_frontend(self, frontend: bytes, message: object) -> None:
        waiting = self.waiting[frontend]
        match message:
            case Outputs(finished=[request], finished_first=[first], payload=[ended]):
                if (request, first) in waiting:
                    waiting[request, first].difference_update(ended)
                    if not any(left for key, left in waiting.items() if key[0] == request):
                        self.release(frontend, request)
            case Lost(requests=requests, first_samples=firsts):
                for key in zip(requests, firsts):
                    if waiting.get(key):
                        self.submit(frontend, key)
            case Refused(request=request, first_sample=first):
                self.refused.append((frontend, (request, first)))

    def retry(self) -> None:
        refused, self.refused = self.refused, []
        for frontend, key in refused:
            if self.waiting[frontend].get(key):
                self.submit(frontend, key)

    def check(self) -> None:
        registry, queue = self.bench.broker.registry, self.bench.broker.queue
        shards = [shard for each in registry.frontends.values() for shard in each.shards]
        assert len(queue) == sum(shard.replica is None for shard in shards)
        kept = [(*shard.frames, shard.page_hashes) for shard in shards]
        assert queue.bytes == sum(len(each) for frames in kept for each in frames)
        for replica in registry.replicas.values():
            assert replica.used == sum(shard.sequences for shard in replica.shards) == replica.by_priority.total()
            assert len(replica.prefixes) <= CARD.kv_cache_tokens // CARD.page_size
            urgent = [s for s in replica.shards if s.priority == min(replica.by_priority, default=0) and s.sequences]
            # What ends of a shard's former copy on the same replica cannot be told from what ends of the present one.
            most = max((shard.sequences for shard in replica.shards), default=0)
            assert replica.used < OVERDRAFT * replica.credits + most or self.twice
            assert sum(s.sequences for s in urgent) <= replica.credits or len(urgent) == 1 or self.twice


@examples(0.4)
@given(st.integers(0, 1 << 32))
def test_whatever_dies_every_request_completes_and_nothing_is_kept(seed: int):
    world = World(Random(seed))
    actions = (
        [world.request] * 6
        + [world.step] * 12
        + [world.publish] * 2
        + [world.cancel, world.retry, world.kill_replica, world.kill_broker]
    )
    while world.number < REQUESTS:
        world.draw.choice(actions)()
        if world.draw.random() < 0.7:
            world.deliver()
    for _ in range(20_000):
        world.deliver()
        if not any(world.waiting.values()):
            break
        world.step()
        world.retry()
        if world.draw.random() < 0.01:
            world.pass_time(1.0)
    assert not any(world.waiting.values())
    world.deliver()
    registry = world.bench.broker.registry
    assert len(registry) == 0 and not registry._shards and not world.bench.broker.queue._levels
    assert not any(world.held.values()), "replicas were told to forget everything"
