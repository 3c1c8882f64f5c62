"""What each message of a frontend leads to."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from broker import recovery
from broker.core import Broker
from broker.policy import choose
from broker.registry import Frontend, Replica, Shard
from toka.messages import (
    REQUEST_ID_BYTES,
    Accepted,
    Cancel,
    Frame,
    JoinFrontend,
    Ping,
    Refused,
    Release,
    Resume,
    Submit,
)
from toka.page_keys import KEY_BYTES
from toka.sockets import is_made_up, parse

INT32 = 1 << 31

log = logging.getLogger(__name__)


def receive(broker: Broker, sender: bytes, frames: Sequence[Frame]) -> None:
    message = parse(frames)
    if message is None or is_made_up(sender):
        return
    frontend = broker.registry.frontend(sender, broker.clock())
    frontend.seen = broker.clock()
    match message:
        case JoinFrontend() if len(message.holds) == len(message.holds_first):
            _join(broker, frontend, message)
        case Submit() if message.frontend == sender and _well_formed(message):
            _submit(broker, frontend, message, frames)
        case Cancel():
            _cancel(broker, frontend, message, frames)
        case Resume():
            _resume(broker, frontend, message, frames)
        case Release():
            _release(broker, frontend, message)
        case Ping() if message.frontend == sender:
            for replica in broker.registry.replicas.values():
                broker.to_replica(replica.identity, frames)
        case _:
            log.warning("message dropped: not one a frontend may send", extra=_about(message, sender))


def _about(message: object, sender: bytes) -> dict[str, object]:
    return {"type": type(message).__name__, "frontend": sender}


def _join(broker: Broker, frontend: Frontend, message: JoinFrontend) -> None:
    """Joins are also heartbeats: only the first of a frontend tells something new."""
    if frontend.joined:
        return
    frontend.joined = True
    log.info("frontend joined", extra={"frontend": frontend.identity, "shards": len(message.holds)})
    broker.tell(frontend, broker.state())
    recovery.match_frontend(broker, frontend, zip(message.holds, message.holds_first))
    broker.dispatch()


def _well_formed(message: Submit) -> bool:
    counts = message.first_sample >= 0 and message.sequences > 0 and -INT32 <= message.priority < INT32
    return len(message.request) == REQUEST_ID_BYTES and len(message.page_hashes) % KEY_BYTES == 0 and counts


def _submit(broker: Broker, frontend: Frontend, message: Submit, frames: Sequence[Frame]) -> None:
    old = broker.registry.shard(message.request, message.first_sample)
    if old is not None:
        if old.frontend is not frontend:
            log.warning("submit dropped: the request is another frontend's", extra={"frontend": frontend.identity})
            return
        broker.withdraw([old])
    shard = Shard(
        message.request,
        message.first_sample,
        frontend,
        message.sequences,
        message.priority,
        frames,
        message.page_hashes,
    )
    if broker.draining:
        _refuse(broker, shard, 503, "the server is shutting down", 0)
    elif not broker.queue.fits(shard) and not _at_once(broker, shard):
        _refuse(broker, shard, 429, "the queue is full", broker.queue.retry_after())
    else:
        broker.registry.add(shard)
        broker.queue.put(shard)
        broker.tell(frontend, Accepted(request=shard.request, first_sample=shard.first))
        broker.dispatch()


def _at_once(broker: Broker, shard: Shard) -> bool:
    """Whether the shard would not have to wait at all."""
    first = broker.queue.first()
    its_turn = first is None or first.priority > shard.priority
    return broker.settled and its_turn and choose(shard, broker.registry.replicas.values()) is not None


def _refuse(broker: Broker, shard: Shard, status: int, reason: str, retry_after: int) -> None:
    refused = Refused(
        frontend=shard.frontend.identity,
        request=shard.request,
        first_sample=shard.first,
        sequences=shard.sequences,
        status=status,
        reason=reason,
        retry_after=retry_after,
    )
    broker.tell(shard.frontend, refused)


def _cancel(broker: Broker, frontend: Frontend, message: Cancel, frames: Sequence[Frame]) -> None:
    """Waiting shards are dropped here; a replica that has some keeps them until they are released."""
    if not message.samples:
        frontend.unmatched.pop(message.request, None)
    replicas: dict[Replica, None] = {}
    for shard in broker.registry.shards_of(message.request, frontend):
        if shard.replica is not None:
            replicas[shard.replica] = None
        elif message.samples:
            shard.cancelled += message.samples
        else:
            broker.withdraw([shard])
    for replica in replicas:
        broker.to_replica(replica.identity, frames)
    broker.dispatch()


def _resume(broker: Broker, frontend: Frontend, message: Resume, frames: Sequence[Frame]) -> None:
    shard = broker.registry.holding(message.request, message.sample)
    if shard is not None and shard.frontend is frontend and shard.replica is not None:
        broker.to_replica(shard.replica.identity, frames)


def _release(broker: Broker, frontend: Frontend, message: Release) -> None:
    replicas: dict[Replica, list[bytes]] = {}
    for request in message.requests:
        frontend.unmatched.pop(request, None)
        for shard in broker.registry.shards_of(request, frontend):
            if shard.replica is None:
                broker.queue.remove(shard)
            elif request not in replicas.setdefault(shard.replica, [])[-1:]:
                replicas[shard.replica].append(request)
            broker.registry.forget(shard)
    for replica, requests in replicas.items():
        broker.order(replica, Release(requests=requests))
    broker.dispatch()
