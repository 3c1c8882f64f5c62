"""The broker as a process, over real sockets."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support.broker import CARD, request_id
from tests.support.server import free_port, running, until
from toka.messages import (
    Accepted,
    JoinFrontend,
    JoinReplica,
    Message,
    Outputs,
    Ping,
    Pong,
    Refused,
    Release,
    State,
    Submit,
)
from toka.sockets import open_socket, parse, receive, send, worker_endpoint


class Peer:
    """A frontend or manager of a few lines: sends messages, and keeps State apart."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], identity: bytes, endpoint: str) -> None:
        self.identity, self.state = identity, None
        self.socket = open_socket(context, zmq.DEALER, identity)
        self.socket.connect(endpoint)

    def send(self, message: Message) -> None:
        assert send(self.socket, message)

    def next(self, kind: type[Message], seconds: float = 10.0) -> Message:
        """The next message of this kind; others that come before it are dropped, pings answered."""
        deadline = time.monotonic() + seconds
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = parse(receive(self.socket) or [])
            if isinstance(message, Ping):
                self.send(Pong(nonce=message.nonce, frontend=b"", epoch=1, running=0, waiting=0, pages_used=0, pages=1))
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {seconds} s")

    def submit(self, number: int) -> None:
        self.send(
            Submit(frontend=self.identity, request=request_id(number), first_sample=0, sequences=1, prompt_tokens=1,
                   priority=0, page_hashes=b"", payload=[b"work"])
        )  # fmt: skip


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def join(replica: Peer, credits: int = 8) -> None:
    replica.send(
        JoinReplica(replica="r0", epoch=1, credits=credits, card=CARD, holds=[], holds_first=[], holds_sequences=[],
                    holds_priorities=[], holds_frontends=[])
    )  # fmt: skip


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "tcp":
        return f"tcp://127.0.0.1:{free_port()}"
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/b"


def test_peers_that_were_there_first_are_served_and_the_end_is_clean(
    endpoint: str, tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
):
    frontend, replica = Peer(context, b"f-1", endpoint), Peer(context, b"m-1", worker_endpoint(endpoint))
    frontend.send(JoinFrontend(holds=[], holds_first=[]))
    join(replica)
    for number in range(500):
        frontend.submit(number)
    with running("broker", broker=endpoint) as broker:
        for _ in range(500):
            shard = replica.next(Submit)
            assert isinstance(shard, Submit)
            replica.send(Outputs(frontend=shard.frontend, epoch=1, finished=[shard.request], finished_first=[0],
                                 finished_sequences=[1], payload=[bytes(100_000)]))  # fmt: skip
        for _ in range(500):
            outputs = frontend.next(Outputs)
            assert isinstance(outputs, Outputs) and len(outputs.payload[0]) == 100_000
            frontend.send(Release(requests=outputs.finished))
        assert broker.stop() == 0, broker.output
        assert not list(tmp_path.glob("b*"))


def test_a_restart_is_another_incarnation(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]):
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/b"
    frontend = Peer(context, b"f-1", endpoint)
    seen = []
    for _ in range(2):
        with running("broker", broker=endpoint) as broker:
            broker.wait_for("ready")
            frontend.send(JoinFrontend(holds=[], holds_first=[]))
            state = frontend.next(State)
            assert isinstance(state, State)
            seen.append(state.incarnation)
            broker.process.send_signal(signal.SIGKILL)
            broker.wait()
    assert seen[0] != seen[1]


def test_a_broker_that_drains_finishes_what_runs_and_refuses_the_rest(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
):
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/b"
    frontend, replica = Peer(context, b"f-1", endpoint), Peer(context, b"m-1", worker_endpoint(endpoint))
    frontend.send(JoinFrontend(holds=[], holds_first=[]))
    join(replica)
    with running("broker", broker=endpoint) as broker:
        frontend.submit(1)
        assert isinstance(replica.next(Submit), Submit)
        frontend.next(Accepted)
        broker.process.send_signal(signal.SIGTERM)
        until(lambda: frontend.next(State).draining, 5.0, "the state says draining")
        frontend.submit(2)
        refused = frontend.next(Refused)
        assert isinstance(refused, Refused) and refused.status == 503
        assert broker.process.poll() is None
        frontend.send(Release(requests=[request_id(1)]))
        assert broker.wait() == 0


def test_garbage_is_dropped_and_logged(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]):
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/b"
    with running("broker", broker=endpoint) as broker:
        for peer in (Peer(context, b"f-1", endpoint), Peer(context, b"m-1", worker_endpoint(endpoint))):
            for frames in ([b""], [b"\xc1", b"x"], [b"\x93\x04\x01\xc0"], [bytes(1000)] * 3):
                peer.socket.send_multipart(frames)
        frontend = Peer(context, b"f-2", endpoint)
        frontend.send(JoinFrontend(holds=[], holds_first=[]))
        assert isinstance(frontend.next(State), State)
        broker.wait_for("message dropped")
        assert broker.stop() == 0


def test_addresses_that_are_not_safe_or_not_free_are_refused_in_one_sentence(tmp_path: Path):
    tmp_path.chmod(0o755)
    with running("broker", broker=f"ipc://{tmp_path}/b") as broker:
        assert broker.wait() == 1 and "must be yours and private" in broker.output
    with running("broker", broker=f"ipc://{tmp_path}/missing/b") as broker:
        assert broker.wait() == 1 and "No such file" in broker.output
    with running("broker", broker="tcp://10.0.0.1:9000") as broker:
        assert broker.wait() == 1 and "loopback" in broker.output
    with running("broker") as broker:
        assert broker.wait() == 1 and "give the address" in broker.output
    tmp_path.chmod(0o700)
    with running("broker", broker=f"ipc://{tmp_path}/b") as first:
        first.wait_for("ready")
        with running("broker", broker=f"ipc://{tmp_path}/b") as second:
            assert second.wait() == 1 and "another process listens" in second.output
            assert "Traceback" not in second.output
        assert first.process.poll() is None
