"""Dispatch, loss and liveness. No sockets: senders and a clock are given, so that tests can drive it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from broker.policy import choose
from broker.queue import WaitingQueue
from broker.registry import Frontend, Registry, Replica, Shard
from toka.messages import Cancel, Fenced, Frame, Lost, Message, Ping, Release, State, encode

PING_SECONDS = 0.25
REPLICA_DEAD_SECONDS = 1.5
"""Silence after which a replica that has answered a ping is dead ..."""
FIRST_ANSWER_SECONDS = 10.0
"""... and one that never has."""
FRONTEND_GONE_SECONDS = 5.0
GRACE_SECONDS = 3.0
"""After a start, how long frontends and replicas have to join: they notice a restart by 2 s of silence."""
STALL_SECONDS = 4 * PING_SECONDS
"""A gap between ticks from which on it was the broker that did not run, and so did not hear."""

SendTo = Callable[[bytes, Sequence[Frame]], bool]
"""Sends frames to an identity; False where that is not possible now."""

log = logging.getLogger(__name__)


class Broker:
    """The state of a broker and what changes it apart from messages (those: `frontends`, `replicas`).

    `incarnation` tells this start of the broker from any other.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        to_frontend: SendTo,
        to_replica: SendTo,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = Registry()
        self.queue = queue
        self.clock = clock
        self.draining = False
        self.settled = False
        """Whether what frontends and replicas hold is known; nothing is dispatched before."""
        self.grace_ends = clock() + GRACE_SECONDS
        self.to_frontend, self.to_replica = to_frontend, to_replica
        self._incarnation = incarnation
        self._ticked = clock()
        self._nonce = 0

    @property
    def idle(self) -> bool:
        """Whether no frontend waits for anything."""
        return not len(self.registry)

    def tell(self, frontend: Frontend, message: Message) -> bool:
        return self.to_frontend(frontend.identity, encode(message))

    def order(self, replica: Replica, message: Message) -> bool:
        return self.to_replica(replica.identity, encode(message))

    def state(self) -> State:
        return State(
            incarnation=self._incarnation,
            replicas=sum(each.open for each in self.registry.replicas.values()),
            queued=len(self.queue),
            card=self.registry.card(),
            draining=self.draining,
            share=self.registry.share(),
        )

    def announce(self) -> None:
        """Send the state to everyone."""
        frames = encode(self.state())
        for identity, frontend in self.registry.frontends.items():
            if frontend.joined:
                self.to_frontend(identity, frames)
        for identity in self.registry.replicas:
            self.to_replica(identity, frames)

    def drain(self) -> None:
        """Take no new shards; those there are go on."""
        self.draining = True
        self.announce()

    def dispatch(self) -> None:
        """Give waiting shards to replicas, in order, as far as credits go."""
        while self.settled and (shard := self.queue.first()) is not None:
            replica = choose(shard, self.registry.replicas.values())
            if replica is None:
                return
            if not self.to_replica(replica.identity, shard.frames):
                replica.reachable = False
                continue
            self.queue.remove(shard)
            self.registry.give(shard, replica)
            if shard.cancelled:
                self.order(replica, Cancel(request=shard.request, samples=shard.cancelled))

    def withdraw(self, shards: Sequence[Shard]) -> None:
        """Nobody wants these shards any more: drop them wherever they are."""
        placed: dict[tuple[Replica, bytes], Frontend] = {}
        for shard in shards:
            if shard.replica is None:
                self.queue.remove(shard)
            else:
                placed[shard.replica, shard.request] = shard.frontend
            self.registry.forget(shard)
        for (replica, request), frontend in placed.items():
            self.disown(replica, request, frontend)

    def disown(self, replica: Replica, request: bytes, frontend: Frontend) -> None:
        """Have the replica drop all it has of a request.

        Which samples a shard has left is known to its payload alone, so a replica cannot be told to drop
        one shard and keep another: those that are wanted still have to be submitted again.
        """
        self.order(replica, Cancel(request=request, samples=[]))
        self.order(replica, Release(requests=[request]))
        lost = [shard for shard in self.registry.shards_of(request, frontend) if shard.replica is replica]
        self._lost(frontend, lost)

    def _lost(self, frontend: Frontend, shards: Sequence[Shard]) -> None:
        for shard in shards:
            self.registry.forget(shard)
        if shards:
            self.tell(frontend, Lost(requests=[s.request for s in shards], first_samples=[s.first for s in shards]))

    def lose(self, replica: Replica, why: str) -> None:
        """The replica's epoch is over: whoever waits for its shards is told, and it is too if it speaks again."""
        shards = list(replica.shards)
        (log.warning if shards or replica.credits else log.info)(
            "replica gone", extra={"replica": replica.name, "why": why, "shards": len(shards)}
        )
        self.registry.fence(replica)
        self.order(replica, Fenced(epoch=replica.epoch))
        waiting: dict[Frontend, list[Shard]] = {}
        for shard in shards:
            waiting.setdefault(shard.frontend, []).append(shard)
        for frontend, lost in waiting.items():
            self._lost(frontend, lost)
        self.announce()
        self.dispatch()

    def tick(self) -> None:
        """Ping, and end what has been silent for too long. Call every PING_SECONDS."""
        now = self.clock()
        passed, self._ticked = now - self._ticked, now
        if passed > STALL_SECONDS:
            self._excuse(passed)
        if passed > 0:
            self.queue.measure(passed)
        for replica in list(self.registry.replicas.values()):
            if now - replica.seen > (REPLICA_DEAD_SECONDS if replica.answered else FIRST_ANSWER_SECONDS):
                self.lose(replica, "silent")
        for frontend in list(self.registry.frontends.values()):
            if now - frontend.seen > FRONTEND_GONE_SECONDS:
                self._expire(frontend)
        self._nonce += 1
        for replica in self.registry.replicas.values():
            self.order(replica, Ping(nonce=self._nonce, frontend=b""))
        self.announce()
        self.dispatch()

    def _excuse(self, seconds: float) -> None:
        """For `seconds` this process did not run: nobody's silence counts."""
        log.warning("the broker did not run for a while", extra={"seconds": seconds})
        for replica in self.registry.replicas.values():
            replica.seen += seconds
        for frontend in self.registry.frontends.values():
            frontend.seen += seconds

    def _expire(self, frontend: Frontend) -> None:
        log.info("frontend gone", extra={"frontend": frontend.identity, "shards": len(frontend.shards)})
        self.withdraw(list(frontend.shards))
        del self.registry.frontends[frontend.identity]
