"""The manager as a process, over real sockets, between a broker's end and a null stage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tests.support.null_stage import NullStage, draw
from toka import sockets
from toka.messages import (
    Cancel,
    Fenced,
    JoinReplica,
    Message,
    Outputs,
    Ping,
    Plan,
    Pong,
    Refused,
    Release,
    Resume,
    SamplingParams,
    StageReady,
    State,
    Stop,
    Submit,
    Tokens,
    Work,
    decode,
    encode,
)

VOCAB = 100
HANGS = """
import time
from workers.manager import __main__, loop
loop.HUNG_SECONDS = 0.5
loop.Loop._turn = lambda self: time.sleep(60)
__main__.main()
"""
ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


class Replica:
    """The process, a thread that is its stage, and the broker's socket that it joins."""

    def __init__(self, folder: Path, *program: str) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.broker = sockets.open_socket(self.context, zmq.ROUTER)
        self.broker.bind(sockets.worker_endpoint(f"ipc://{folder}/broker"))
        self.stage = NullStage(pages=40, page_size=16, max_seqs=4, max_pages=16, vocab=VOCAB)
        self.stopped, self.closing = threading.Event(), threading.Event()
        self.hold = threading.Event()
        self.hold.set()
        self.identity = b""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                *(program or ("-m", "workers.manager")),
                f"model={folder}/model",
                f"run_dir={folder}",
                f"broker=ipc://{folder}/broker",
                "replica=r0",
                "shutdown_timeout=20",
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self.thread = threading.Thread(target=self._run_stage, args=(folder,), daemon=True)
        self.thread.start()

    def _run_stage(self, folder: Path) -> None:
        plans = sockets.open_socket(self.context, zmq.PULL)
        plans.connect(f"ipc://{folder}/plans-0")
        results = sockets.open_socket(self.context, zmq.PUSH)
        results.connect(f"ipc://{folder}/results")
        sockets.send(results, StageReady(stage=0, pages=40, max_seqs=4, max_tokens_per_step=64))
        while not self.closing.is_set() and not self.stopped.is_set():
            if not plans.poll(50):
                continue
            message = decode(plans.recv_multipart())
            if isinstance(message, Stop):
                self.stopped.set()
            else:
                assert isinstance(message, Plan)
                self.hold.wait(20)
                sockets.send(results, self.stage.run(message))
        plans.close(linger=0)
        results.close(linger=0)

    def receive(self, kind: type[Message], timeout: float = 20) -> Any:
        """The next message of `kind` from the manager."""
        while self.broker.poll(int(timeout * 1000)):
            identity, *frames = self.broker.recv_multipart()
            message = decode(frames)
            if isinstance(message, kind):
                self.identity = identity
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def send(self, message: Message) -> None:
        assert sockets.send(self.broker, message, [self.identity])

    def submit(self, number: int, prompt: list[int], max_tokens: int, **params: Any) -> bytes:
        request = number.to_bytes(16, "big")
        ids = np.array(prompt, np.int32)
        self.stage.expect[number, 0] = ids
        work = Work(
            params=SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True, **params),
            samples=[0],
            output_counts=[0],
            prompt=ids,
            outputs=np.empty(0, np.int32),
        )
        self.send(
            Submit(
                frontend=b"f-1",
                request=request,
                first_sample=0,
                sequences=1,
                prompt_tokens=len(prompt),
                priority=0,
                page_hashes=b"",
                payload=encode(work),
            )
        )
        return request

    def collect(self, request: bytes, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            outputs = decode(self.receive(Outputs).payload)
            assert isinstance(outputs, Tokens)
            assert set(outputs.counts.tolist()) <= {1}
            for row, (first, token) in enumerate(zip(outputs.first.tolist(), outputs.tokens.tolist())):
                if outputs.requests[16 * row : 16 * row + 16] == request:
                    assert first == len(tokens)
                    tokens.append(token)
        return tokens

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.hold.set()
        self.closing.set()
        self.thread.join()
        self.broker.close(linger=0)
        self.context.term()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    made = Replica(tmp_path)
    try:
        yield made
    finally:
        made.close()


def welcome(replica: Replica, incarnation: int = 1) -> JoinReplica:
    joined = replica.receive(JoinReplica)
    replica.send(State(incarnation=incarnation, replicas=1, queued=0, card=joined.card, draining=False))
    return joined


def expected(number: int, count: int) -> list[int]:
    return [draw(number, 0, position, VOCAB) for position in range(count)]


def test_a_request_from_submit_to_release(replica):
    joined = welcome(replica)
    assert (joined.replica, joined.holds, joined.credits) == ("r0", [], 8)
    assert (joined.card.vocab_size, joined.card.context_length, joined.card.kv_cache_tokens) == (VOCAB, 256, 640)
    request = replica.submit(1, [5, 6, 7], 9)
    assert replica.collect(request, 9) == expected(1, 9)
    replica.send(Resume(request=request, sample=0, have=4))
    again = decode(replica.receive(Outputs).payload)
    assert again.first.tolist() == [4] and again.tokens.tolist() == expected(1, 9)[4:]
    replica.send(State(incarnation=2, replicas=1, queued=0, card=joined.card, draining=False))
    assert replica.receive(JoinReplica).holds == [request], "a new broker is told what is held"
    replica.send(Release(requests=[request]))
    replica.send(State(incarnation=3, replicas=1, queued=0, card=joined.card, draining=False))
    assert replica.receive(JoinReplica).holds == []


def test_pings_are_answered_by_the_loop_and_count_what_runs(replica):
    welcome(replica)
    replica.hold.clear()
    replica.submit(1, [5, 6, 7], 9)
    replica.send(Ping(nonce=7, frontend=b"f-1"))
    pong = replica.receive(Pong)
    assert (pong.nonce, pong.frontend, pong.running + pong.waiting, pong.pages) == (7, b"f-1", 1, 40)
    replica.hold.set()


def test_what_cannot_run_is_refused_and_the_rest_goes_on(replica):
    welcome(replica)
    replica.submit(1, [5] * 200, 100)
    refused = replica.receive(Refused)
    assert refused.status == 400 and "300" in refused.reason and "256" in refused.reason
    replica.send(
        Submit(
            frontend=b"f-1",
            request=b"x" * 16,
            first_sample=0,
            sequences=1,
            prompt_tokens=1,
            priority=0,
            page_hashes=b"",
            payload=[b"rubbish"],
        )
    )
    assert replica.receive(Refused).request == b"x" * 16
    replica.broker.send_multipart([replica.identity, b"\xff", b"rubbish"])
    request = replica.submit(2, [5, 6], 3)
    assert replica.collect(request, 3) == expected(2, 3)


def test_a_cancelled_request_gives_its_credit_back(replica):
    welcome(replica)
    replica.hold.clear()
    request = replica.submit(1, [5, 6, 7], 100)
    replica.send(Cancel(request=request, samples=[]))
    outputs = replica.receive(Outputs)
    assert (outputs.finished, outputs.finished_sequences) == ([request], [1])
    replica.hold.set()


def test_a_fenced_replica_starts_over_as_another_epoch(replica):
    joined = welcome(replica)
    replica.hold.clear()
    replica.submit(1, [5, 6, 7], 100)
    replica.send(Fenced(epoch=joined.epoch))
    again = replica.receive(JoinReplica)
    while again.epoch == joined.epoch:
        again = replica.receive(JoinReplica)
    assert again.holds == []
    replica.hold.set()
    request = replica.submit(2, [5, 6], 5)
    assert replica.collect(request, 5) == expected(2, 5)


def test_what_never_came_is_refused_when_it_is_to_be_resumed(replica):
    welcome(replica)
    replica.send(Resume(request=b"y" * 16, sample=3, have=0))
    refused = replica.receive(Refused)
    assert (refused.request, refused.first_sample, refused.status) == (b"y" * 16, 3, 503)


def test_a_silent_broker_is_joined_again(replica):
    first = replica.receive(JoinReplica)
    second = replica.receive(JoinReplica)
    assert first.epoch == second.epoch


def test_a_loop_that_hangs_ends_the_process_with_a_failure(tmp_path):
    replica = Replica(tmp_path, "-c", HANGS)
    try:
        assert replica.process.wait(20) == 1
    finally:
        replica.close()


def test_sigterm_finishes_what_runs(replica):
    welcome(replica)
    replica.hold.clear()
    request = replica.submit(1, [5, 6, 7], 30)
    replica.send(Ping(nonce=1, frontend=b""))
    replica.receive(Pong)
    replica.process.send_signal(signal.SIGTERM)
    while replica.receive(JoinReplica).credits:
        pass
    replica.hold.set()
    assert replica.collect(request, 30) == expected(1, 30)
    assert replica.process.wait(20) == 0
    assert replica.stopped.wait(5), "the stages are told to stop"
