"""Activations and ids between stages, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import zmq

from toka.config import Config
from workers.stage.partition import Seat
from workers.stage.pipe import ZmqPipe

HIDDEN, CPU = 6, torch.device("cpu")


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[list[ZmqPipe]]:
    """Of two pipeline stages of two ranks each."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = Config(run_dir=str(tmp_path))
    made = [ZmqPipe(context, config, Seat(stage, 4, 2), HIDDEN, torch.bfloat16, CPU) for stage in range(4)]
    inboxes = [pipe.endpoint for pipe in made]
    for pipe in made:
        pipe.connect(inboxes)
    yield made
    for pipe in made:
        pipe.close()
    context.term()
    assert not list(tmp_path.iterdir()), "a socket file is left"


def test_activations_reach_the_same_rank_of_the_next_stage(pipes: list[ZmqPipe]) -> None:
    sent = {(rank, step): torch.randn(step, HIDDEN).bfloat16() for rank in (0, 1) for step in (1, 2, 300)}
    for (rank, step), x in sent.items():
        pipes[rank].send(step, x)
    for (rank, step), x in sent.items():
        assert torch.equal(pipes[2 + rank].receive(step, step), x)


def test_ids_come_back_up_to_the_step_that_is_asked_for(pipes: list[ZmqPipe]) -> None:
    first, last = pipes[1], pipes[3]
    for step in (3, 5):
        last.send_sampled(step, np.array([step, 9], np.int32), np.array([7, step], np.int32))
    found = {int(slots[0]): tokens.tolist() for slots, tokens in first.sampled(5)}
    assert found == {3: [7, 3], 5: [7, 5]}
    assert first.sampled(5) == [] and first.sampled(0) == []
    late = Thread(target=lambda: last.send_sampled(6, np.array([1], np.int32), np.array([2], np.int32)))
    late.start()
    ((slots, tokens),) = first.sampled(6)
    assert (slots.tolist(), tokens.tolist()) == ([1], [2])
    late.join()
