"""A broker without sockets or a real clock, and simulated frontends and replicas that talk to it in messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from broker import frontends, recovery, replicas
from broker.core import PING_SECONDS, Broker
from broker.queue import WaitingQueue
from toka.messages import (
    Frame,
    JoinFrontend,
    JoinReplica,
    Message,
    ModelCard,
    Outputs,
    Pages,
    Ping,
    Pong,
    State,
    Submit,
    decode,
    encode,
)

CARD = ModelCard(
    name="tiny",
    vocab_size=64,
    context_length=128,
    kv_cache_tokens=4096,
    page_size=16,
    eos_token_ids=[2],
    max_logprobs=20,
)
Held = tuple[bytes, int, int, bytes] | tuple[bytes, int, int, bytes, int]
"""Request, first sample, sequences, frontend, and priority, 0 where it is left out."""


def request_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """`sent[identity]`: what the broker sent there, State and its own pings left out."""

    queue_requests: int = 1_000_000
    queue_bytes: int = 1 << 40
    clock: Clock = field(default_factory=Clock)
    incarnation: int = 1
    unreachable: set[bytes] = field(default_factory=set)
    silent: set[bytes] = field(default_factory=set)
    """Replicas that do not answer pings, frontends that do not beat."""
    holds_of: Callable[[bytes], Iterable[tuple[bytes, int]]] = lambda identity: ()
    """What a frontend says in its heartbeats that it waits for."""

    def __post_init__(self) -> None:
        self.sent: defaultdict[bytes, list[Message]] = defaultdict(list)
        self.states: dict[bytes, State] = {}
        self._pings: list[tuple[bytes, Ping]] = []
        queue = WaitingQueue(self.queue_requests, self.queue_bytes)
        self.broker = Broker(queue, self._deliver, self._deliver, self.incarnation, self.clock)

    def _deliver(self, identity: bytes, frames: Sequence[Frame]) -> bool:
        if identity in self.unreachable:
            return False
        message = decode(frames)
        if isinstance(message, State):
            self.states[identity] = message
        elif isinstance(message, Ping) and not message.frontend:
            self._pings.append((identity, message))
        else:
            self.sent[identity].append(message)
        return True

    def take(self, identity: bytes) -> list[Message]:
        """What was sent to a peer since the last call."""
        return self.sent.pop(identity, [])

    def frontend(self, identity: bytes, message: Message) -> None:
        frontends.receive(self.broker, identity, encode(message))

    def replica(self, identity: bytes, message: Message) -> None:
        replicas.receive(self.broker, identity, encode(message))

    def join_frontend(self, identity: bytes, holds: Iterable[tuple[bytes, int]] = ()) -> bytes:
        held = list(holds)
        self.frontend(identity, JoinFrontend(holds=[r for r, _ in held], holds_first=[f for _, f in held]))
        return identity

    def join_replica(
        self, name: str, epoch: int = 1, credits: int = 64, holds: Iterable[Held] = (), card: ModelCard = CARD
    ) -> bytes:
        identity, held = b"m-%s-%x" % (name.encode(), epoch), list(holds)
        join = JoinReplica(
            replica=name,
            epoch=epoch,
            credits=credits,
            card=card,
            holds=[each[0] for each in held],
            holds_first=[each[1] for each in held],
            holds_sequences=[each[2] for each in held],
            holds_priorities=[(*each, 0)[4] for each in held],
            holds_frontends=[each[3] for each in held],
        )
        self.replica(identity, join)
        return identity

    def submit(
        self,
        frontend: bytes,
        number: int,
        *,
        first: int = 0,
        sequences: int = 1,
        priority: int = 0,
        payload: bytes = b"work",
        keys: Sequence[bytes] = (),
    ) -> bytes:
        """keys: of the full pages of its prompt."""
        request = request_id(number)
        message = Submit(
            frontend=frontend,
            request=request,
            first_sample=first,
            sequences=sequences,
            prompt_tokens=1,
            priority=priority,
            page_hashes=b"".join(keys),
            payload=[payload],
        )
        self.frontend(frontend, message)
        return request

    def publish(
        self, replica: bytes, inserted: Sequence[bytes] = (), evicted: Sequence[bytes] = (), *, whole: bool = False
    ) -> None:
        self.replica(replica, Pages(whole=whole, inserted=b"".join(inserted), evicted=b"".join(evicted)))

    def finish(self, replica: bytes, epoch: int, shard: Submit, sequences: int | None = None) -> None:
        """The replica ends sequences of a shard, all of them unless told how many."""
        outputs = Outputs(
            frontend=shard.frontend,
            epoch=epoch,
            finished=[shard.request],
            finished_first=[shard.first_sample],
            finished_sequences=[shard.sequences if sequences is None else sequences],
            payload=[b"tokens", b"more"],
        )
        self.replica(replica, outputs)

    def advance(self, seconds: float) -> None:
        """Let time pass: the broker ticks, and everyone who is not silent answers."""
        for _ in range(round(seconds / PING_SECONDS)):
            self.clock.now += PING_SECONDS
            recovery.settle(self.broker)
            self.broker.tick()
            pings, self._pings = self._pings, []
            for identity, ping in pings:
                if identity not in self.silent:
                    self.replica(identity, pong(ping))
            for identity in list(self.broker.registry.frontends):
                if identity not in self.silent:
                    self.join_frontend(identity, self.holds_of(identity))


def prompt_keys(prompt: int, pages: int, shared: int = 0) -> list[bytes]:
    """Of a prompt that has its first `shared` pages in common with all others."""
    names = [(0 if page < shared else 1 + prompt, page) for page in range(pages)]
    return [name.to_bytes(8, "little") + page.to_bytes(8, "little") for name, page in names]


def pong(ping: Ping, epoch: int = 1) -> Pong:
    return Pong(nonce=ping.nonce, frontend=ping.frontend, epoch=epoch, running=0, waiting=0, pages_used=0, pages=1)
