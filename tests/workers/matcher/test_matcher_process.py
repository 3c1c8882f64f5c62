"""The matcher as a process: spoken to over its socket, as a manager and two ranks do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.support.matching import regex
from tests.support.server import ROOT
from tests.support.tiny import tiny_config
from toka.messages import (
    Compile,
    Compiled,
    Constrain,
    GrammarSetup,
    Masks,
    Message,
    Sampled,
    StageHello,
    Stop,
    decode,
)
from toka.sockets import open_socket, send
from workers.endpoints import MANAGER, stage_name

NONE = np.empty(0, np.int32)


class Peers:
    def __init__(self, folder: Path) -> None:
        model = tiny_config(folder / "model")
        command = [sys.executable, "-P", "-m", "workers.matcher", f"model={model}", f"run_dir={folder}"]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen([*command, "pp_size=2", "tp_size=2", "replica=r0"], env=environ)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        names = (MANAGER, stage_name(2), stage_name(3), b"")
        self.manager, *self.ranks, self.teller = (open_socket(self.context, zmq.DEALER, name) for name in names)
        for socket in (self.manager, *self.ranks, self.teller):
            socket.connect(f"ipc://{folder}/matcher")

    def hello(self, rank: int) -> None:
        send(self.ranks[rank], StageHello(stage=2 + rank, settings={}))

    def receive(self, socket: zmq.Socket[bytes], kind: type[Message]) -> Message:
        assert socket.poll(20_000), f"no {kind.__name__} came"
        message = decode(socket.recv_multipart())
        assert isinstance(message, kind)
        return message

    def constrain(self, step: int, text: str = "") -> None:
        setup = GrammarSetup(slot=4, grammar=0, grammar_after=-1, banned_ids=[], min_tokens=0, outputs=b"")
        setups = [setup] if text else []
        slots, positions = np.array([4], np.int32), np.array([step - 1], np.int32)
        send(
            self.manager,
            Constrain(step=step, grammars=[text] if text else [], setups=setups, slots=slots, positions=positions),
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    yield made
    made.close()


def test_masks_for_every_rank_until_the_manager_says_stop(peers: Peers) -> None:
    peers.hello(0)
    text = regex("aa")
    send(peers.manager, Compile(number=7, grammar=text))
    compiled = peers.receive(peers.manager, Compiled)
    assert isinstance(compiled, Compiled) and (compiled.number, compiled.error) == (7, "")
    peers.manager.send_multipart([b"rubbish"])
    send(peers.manager, Compile(number=8, grammar="rubbish"))
    refused = peers.receive(peers.manager, Compiled)
    assert isinstance(refused, Compiled) and refused.number == 8 and refused.error
    peers.constrain(1, text)
    peers.constrain(2)
    # Not all ranks are there: nothing may be lost to the one that comes late.
    assert not peers.ranks[0].poll(200)
    peers.hello(1)
    first = [peers.receive(rank, Masks) for rank in peers.ranks]
    send(peers.manager, Stop())
    time.sleep(0.1)
    assert peers.process.poll() is None, "a step that was sent waits for its masks"
    (letter,) = np.flatnonzero(np.unpackbits(first[0].bits, bitorder="little"))  # type: ignore[attr-defined]
    send(peers.teller, Sampled(step=1, slots=NONE, tokens=np.array([letter], np.int32)))
    second = [peers.receive(rank, Masks) for rank in peers.ranks]
    for number, masks in ((1, first), (2, second)):
        assert all(isinstance(each, Masks) and each.step == number for each in masks)
        assert all(np.array_equal(each.bits, masks[0].bits) for each in masks)  # type: ignore[attr-defined]
    assert peers.process.wait(10) == 0


def test_without_a_grammar_it_has_read_no_model_and_ends_at_once(peers: Peers, tmp_path: Path) -> None:
    for path in (tmp_path / "model").iterdir():
        path.unlink()
    send(peers.manager, Stop())
    assert peers.process.wait(10) == 0
    assert not (tmp_path / "matcher").exists()
