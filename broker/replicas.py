"""What each message of a replica's manager leads to."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from broker import recovery
from broker.core import Broker
from broker.registry import Replica
from toka.messages import Fenced, Frame, JoinReplica, Outputs, Pages, Pong, Refused, encode
from toka.page_keys import split
from toka.sockets import is_made_up, parse

log = logging.getLogger(__name__)


def receive(broker: Broker, sender: bytes, frames: Sequence[Frame]) -> None:
    message = parse(frames)
    if message is None:
        return
    if (epoch := broker.registry.fenced_epoch(sender)) is not None:
        broker.to_replica(sender, encode(Fenced(epoch=epoch)))
        return
    replica = broker.registry.replicas.get(sender)
    if replica is not None:
        replica.seen, replica.reachable = broker.clock(), True
    match message:
        case JoinReplica() if is_made_up(sender):
            # As another, it would take its own name from itself.
            pass
        case JoinReplica() if _well_formed(message):
            _join(broker, sender, replica, message)
        case Outputs() if replica is None or message.epoch == replica.epoch:
            _outputs(broker, replica, message, frames)
        case Pong() if replica is not None:
            replica.answered = True
            _forward(broker, message.frontend, frames)
        case Pages() if replica is not None:
            _pages(replica, message)
        case Refused() if replica is not None:
            _refused(broker, replica, message)
        case _ if replica is not None:
            log.warning("message dropped: not one a replica may send", extra=_about(message, replica))
    if replica is None and not isinstance(message, JoinReplica):
        # It joined an earlier incarnation of the broker; from this it learns that there is another.
        broker.to_replica(sender, encode(broker.state()))


def _about(message: object, replica: Replica) -> dict[str, object]:
    return {"type": type(message).__name__, "replica": replica.name}


def _well_formed(message: JoinReplica) -> bool:
    lists = (message.holds_first, message.holds_sequences, message.holds_priorities, message.holds_frontends)
    counts = message.card.page_size > 0 and min(message.holds_sequences, default=0) >= 0
    return all(len(each) == len(message.holds) for each in lists) and counts


def _join(broker: Broker, sender: bytes, known: Replica | None, message: JoinReplica) -> None:
    if known is not None:
        # What it holds was not complete when it wrote this if a shard was on its way to it.
        known.credits, known.card = message.credits, message.card
        broker.announce()
        broker.dispatch()
        return
    if not broker.registry.welcomes(message.card):
        # Unanswered, it asks again, and is let in when those that serve another model are gone.
        if broker.registry.note_stranger(sender):
            log.error("replica not admitted: its model is another", extra={"replica": message.replica})
        return
    former = broker.registry.named(message.replica)
    if former is not None:
        broker.lose(former, "another took its name")
    replica = Replica(sender, message.replica, message.epoch, message.credits, message.card, broker.clock())
    broker.registry.replicas[sender] = replica
    log.info(
        "replica joined", extra={"replica": replica.name, "credits": replica.credits, "shards": len(message.holds)}
    )
    recovery.match_replica(broker, replica, message)
    broker.announce()
    broker.dispatch()


def _outputs(broker: Broker, replica: Replica | None, message: Outputs, frames: Sequence[Frame]) -> None:
    """Pass them on. Of one that is not known yet, too: they waited in its socket while the broker was away."""
    for request, first, sequences in zip(message.finished, message.finished_first, message.finished_sequences):
        shard = broker.registry.shard(request, first)
        if shard is not None and shard.replica is replica and replica is not None:
            broker.registry.finish(shard, sequences)
    _forward(broker, message.frontend, frames)
    if message.finished:
        broker.dispatch()


def _pages(replica: Replica, message: Pages) -> None:
    if message.whole:
        replica.prefixes.clear()
    replica.prefixes.remove(split(message.evicted))
    replica.prefixes.add(split(message.inserted))


def _refused(broker: Broker, replica: Replica, message: Refused) -> None:
    shard = broker.registry.holding(message.request, message.first_sample)
    if shard is not None and shard.replica is replica:
        broker.registry.forget(shard)
        # A replica that was asked to resume what never reached it knows neither of these two.
        told = dataclasses.replace(message, frontend=shard.frontend.identity, first_sample=shard.first)
        broker.tell(shard.frontend, told)
        broker.dispatch()


def _forward(broker: Broker, frontend: bytes, frames: Sequence[Frame]) -> None:
    if frontend in broker.registry.frontends:
        broker.to_frontend(frontend, frames)
