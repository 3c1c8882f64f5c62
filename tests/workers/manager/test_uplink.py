from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.support.harness import Harness
from toka import sockets
from toka.messages import JoinReplica, ModelCard, Pages, Refused, Release, State, decode
from workers.manager import uplink
from workers.manager.uplink import Uplink

CARD = ModelCard(
    name="m", vocab_size=97, context_length=96, kv_cache_tokens=96, page_size=4, eos_token_ids=[0], max_logprobs=0
)
REFUSED = Refused(frontend=b"f", request=b"", first_sample=0, sequences=1, status=503, reason="", retry_after=0)


def test_the_broker_is_not_silent_while_messages_of_it_are_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A shard among them is not among what a join says is held: a restarted broker would declare it lost."""
    monkeypatch.setattr(uplink, "SILENCE_SECONDS", 0)
    monkeypatch.setattr(uplink, "REJOIN_SECONDS", 0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broker = sockets.open_socket(context, zmq.ROUTER)
    broker.bind(f"ipc://{tmp_path}/broker")
    link = Uplink(context, f"ipc://{tmp_path}/broker", "r0", CARD, Harness().scheduler.state)
    try:
        link.keep()
        identity, *frames = broker.recv_multipart()
        assert isinstance(decode(frames), JoinReplica)
        sockets.send(broker, Release(requests=[]), [identity])
        assert link.socket.poll(5_000)
        link.keep()
        link.send(REFUSED)
        assert isinstance(decode(broker.recv_multipart()[1:]), Refused), "it has not joined"
        assert len(link.received()) == 1
        link.keep()
        assert isinstance(decode(broker.recv_multipart()[1:]), JoinReplica)
    finally:
        link.socket.close(linger=0)
        broker.close(linger=0)
        context.term()


def test_the_broker_is_told_of_pages_all_after_a_join_and_then_what_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uplink, "PUBLISH_SECONDS", 0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broker = sockets.open_socket(context, zmq.ROUTER)
    broker.bind(f"ipc://{tmp_path}/broker")
    state = Harness(pages=6).scheduler.state
    link = Uplink(context, f"ipc://{tmp_path}/broker", "r0", CARD, state)

    def told() -> tuple[bool, bytes, bytes]:
        link.publish()
        link.send(REFUSED)
        message = decode(broker.recv_multipart()[1:])
        if isinstance(message, Refused):
            return False, b"", b""
        assert isinstance(message, Pages) and isinstance(decode(broker.recv_multipart()[1:]), Refused)
        return message.whole, message.inserted, message.evicted

    def meet(incarnation: int) -> None:
        sockets.send(
            broker, State(incarnation=incarnation, replicas=1, queued=0, card=None, draining=False), [identity]
        )
        assert link.socket.poll(5_000)
        assert link.received() == []

    try:
        link.keep()
        identity, *frames = broker.recv_multipart()
        assert isinstance(decode(frames), JoinReplica)
        state.pages.key(pages := state.pages.take(2).tolist(), [b"a" * 16, b"b" * 16])
        assert told() == (False, b"", b""), "nobody has answered"
        meet(1)
        assert told() == (False, b"", b""), "it has to join first"
        link.keep()
        broker.recv_multipart()
        assert told() == (True, b"a" * 16 + b"b" * 16, b"")
        assert told() == (False, b"", b"")
        state.pages.release(np.array(pages, np.int32))
        state.pages.key(state.pages.take(5).tolist(), [b"c" * 16])
        assert told() == (False, b"c" * 16, b"b" * 16)
        meet(2)
        link.keep()
        broker.recv_multipart()
        assert told() == (True, b"a" * 16 + b"c" * 16, b"")
    finally:
        link.socket.close(linger=0)
        broker.close(linger=0)
        context.term()
