"""After a restart: rebuild the registry from what frontends and replicas say they hold.

A shard that both hold goes on. One that only a frontend holds is lost, once the grace is over; one that
only a replica holds is dropped there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from broker.core import Broker
from broker.registry import Frontend, Key, Replica, Shard
from toka.messages import JoinReplica, Lost

log = logging.getLogger(__name__)


def match_frontend(broker: Broker, frontend: Frontend, holds: Iterable[Key]) -> None:
    """A frontend that was unknown has joined and waits for `holds`."""
    wanted: dict[bytes, set[int]] = {}
    for request, first in holds:
        wanted.setdefault(request, set()).add(first)
    broker.withdraw([shard for shard in frontend.shards if shard.request not in wanted])
    for shard in frontend.shards:
        wanted[shard.request].discard(shard.first)
    frontend.unmatched = {request: firsts for request, firsts in wanted.items() if firsts}
    settle(broker)


def match_replica(broker: Broker, replica: Replica, message: JoinReplica) -> None:
    """A replica that was unknown has joined; `message` says what it holds."""
    registry, now = broker.registry, broker.clock()
    unwanted: dict[bytes, Frontend] = {}
    for request, first, sequences, priority, identity in zip(
        message.holds, message.holds_first, message.holds_sequences, message.holds_priorities, message.holds_frontends
    ):
        frontend = registry.frontend(identity, now)
        held = Shard(request, first, frontend, sequences, priority)
        asked = not frontend.joined or request in frontend.unmatched or registry.shards_of(request, frontend)
        if registry.shard(request, first) is not None or not asked:
            unwanted[request] = frontend
            continue
        registry.add(held)
        registry.give(held, replica)
        if request in frontend.unmatched:
            frontend.unmatched[request].discard(first)
            if not frontend.unmatched[request]:
                del frontend.unmatched[request]
    for request, frontend in unwanted.items():
        broker.disown(replica, request, frontend)
    settle(broker)


def settle(broker: Broker) -> None:
    """End the recovery where nothing is open any more, or the grace is over."""
    registry = broker.registry
    over = broker.clock() >= broker.grace_ends
    if over:
        for frontend in registry.frontends.values():
            _declare_lost(broker, frontend)
    agreed = all(each.joined and not each.unmatched for each in registry.frontends.values())
    if over or (agreed and registry.frontends and registry.replicas):
        broker.settled = True


def _declare_lost(broker: Broker, frontend: Frontend) -> None:
    if frontend.unmatched:
        lost = [(request, first) for request, firsts in frontend.unmatched.items() for first in sorted(firsts)]
        frontend.unmatched = {}
        log.warning("shards lost", extra={"frontend": frontend.identity, "shards": len(lost)})
        broker.tell(frontend, Lost(requests=[r for r, _ in lost], first_samples=[f for _, f in lost]))
