"""The stage as a process: started like the launcher does, spoken to over its ipc sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.support.plans import Row, Setup, plan
from tests.support.tiny import tiny_model
from toka.messages import Message, Plan, StageReady, StepResult, Stop, decode
from toka.sockets import open_socket, send

HOME = Path(__file__).resolve().parents[3]
WAIT_MS = 60_000


class ManagerSide:
    """The sockets a manager binds, and the stage process."""

    def __init__(self, run_dir: Path, *settings: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.plans, self.results = (open_socket(self.context, kind) for kind in (zmq.PUSH, zmq.PULL))
        self.plans.bind(f"ipc://{run_dir}/plans-0")
        self.results.bind(f"ipc://{run_dir}/results")
        command = [sys.executable, "-P", "-m", "workers.stage", f"run_dir={run_dir}", "threads=1", *settings]
        environ = os.environ | {"PYTHONPATH": str(HOME), "TOKA_STAGE": "0"}
        self.process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)

    def receive(self) -> Message:
        assert self.results.poll(WAIT_MS), "the stage says nothing"
        return decode(self.results.recv_multipart())

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=WAIT_MS / 1000)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def manager(model: Path, tmp_path: Path) -> Iterator[ManagerSide]:
    side = ManagerSide(tmp_path, f"model={model}", "kv_cache_tokens=1024", "max_seqs=4", "max_tokens_per_step=32")
    yield side
    side.close()


def a_plan(step: int) -> Plan:
    row = Row(slot=0, start=0, tokens=[5, 6, 7], samples=[(0, 0)])
    setup = Setup(slot=0, temperature=0.0, logprobs=2)
    return plan(step=step, setups=[setup], table=[(0, 0, 3)], rows=[row])


def test_ready_plans_stop(manager: ManagerSide) -> None:
    ready = manager.receive()
    assert isinstance(ready, StageReady)
    assert (ready.stage, ready.pages, ready.max_seqs, ready.max_tokens_per_step) == (0, 64, 4, 32)
    for step in (1, 2):
        send(manager.plans, a_plan(step))
    manager.plans.send_multipart([b"not a message"])
    again = plan(step=3, rows=[Row(slot=0, start=3, tokens=[-1], samples=[(0, 1)])])
    send(manager.plans, again)
    results = [manager.receive() for _ in range(3)]
    assert all(isinstance(each, StepResult) for each in results)
    first, second, third = results
    assert isinstance(first, StepResult) and isinstance(second, StepResult) and isinstance(third, StepResult)
    assert [each.step for each in (first, second, third)] == [1, 2, 3]
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert (len(third.tokens), len(third.chosen), len(third.top_ids), len(third.top_values)) == (1, 1, 2, 2)
    assert third.top_ids[0] == third.tokens[0]
    send(manager.plans, Stop())
    assert manager.end()[0] == 0


def test_sigterm_ends_it_with_zero(manager: ManagerSide) -> None:
    manager.receive()
    send(manager.plans, a_plan(1))
    manager.receive()
    manager.process.send_signal(signal.SIGTERM)
    assert manager.end()[0] == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model=/nowhere/at/all"], "/nowhere/at/all"),
        (["model={model}", "kv_cache_tokens=1000000000000"], "kv_cache_tokens"),
        (["model={model}", "device=cuda"], "device"),
    ],
)
def test_what_does_not_fit_ends_it_with_one_sentence(
    model: Path, tmp_path: Path, settings: list[str], sentence: str
) -> None:
    if "device=cuda" in settings:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    side = ManagerSide(tmp_path, *(each.format(model=model) for each in settings))
    try:
        status, errors = side.end()
    finally:
        side.close()
    assert status == 1
    assert sentence in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors
