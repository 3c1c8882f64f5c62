"""The manager as a process, over real sockets, between a broker's end and a null stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from tests.support.null_stage import NullStage, draw
from tests.support.submission import header
from toka import sockets
from toka.messages import (
    JoinReplica,
    Message,
    Outputs,
    Plan,
    SamplingParams,
    StageReady,
    State,
    Stop,
    Tokens,
    Work,
    decode,
    encode,
)
from workers.endpoints import MANAGER

VOCAB = 100
ROOT = Path(__file__).resolve().parents[2]
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

    def __init__(
        self, folder: Path, *program: str, pace: Callable[[int], None] = lambda step: None, **settings: object
    ) -> None:
        """program: arguments of Python in place of the manager's module. pace: called before each step's result."""
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.broker = sockets.open_socket(self.context, zmq.ROUTER)
        self.broker.bind(sockets.worker_endpoint(f"ipc://{folder}/broker"))
        self.matcher = sockets.open_socket(self.context, zmq.ROUTER)
        self.matcher.bind(f"ipc://{folder}/matcher")
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
                *(f"{key}={value}" for key, value in settings.items()),
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self._pace = pace
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
                self._pace(message.step)
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

    def told_matcher(self, kind: type[Message]) -> Any:
        """What the manager says to its matcher next, which is of `kind`."""
        assert self.matcher.poll(20_000), f"no {kind.__name__} came"
        identity, *frames = self.matcher.recv_multipart()
        message = decode(frames)
        assert identity == MANAGER and isinstance(message, kind)
        return message

    def say_as_matcher(self, message: Message) -> None:
        assert sockets.send(self.matcher, message, [MANAGER])

    def send(self, message: Message) -> None:
        assert sockets.send(self.broker, message, [self.identity])

    def submit(self, number: int, prompt: list[int], max_tokens: int, n: int = 1, **params: Any) -> bytes:
        request = number.to_bytes(16, "big")
        ids = np.array(prompt, np.int32)
        self.stage.expect |= {(number, sample): ids for sample in range(n)}
        work = Work(
            params=SamplingParams(**{"max_tokens": max_tokens, "seed": number, "ignore_eos": True} | params),
            samples=list(range(n)),
            output_counts=[0] * n,
            prompt=ids,
            outputs=np.empty(0, np.int32),
        )
        self.send(header(b"f-1", request, work, payload=encode(work)))
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
        self.matcher.close(linger=0)
        self.context.term()


def welcome(replica: Replica, incarnation: int = 1) -> JoinReplica:
    joined = replica.receive(JoinReplica)
    replica.send(State(incarnation=incarnation, replicas=1, queued=0, card=joined.card, draining=False))
    return joined


def expected(number: int, count: int) -> list[int]:
    return [draw(number, 0, position, VOCAB) for position in range(count)]
