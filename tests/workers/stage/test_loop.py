"""The loop of an executor that runs ahead: results come from a thread, in order, and a failure ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Thread

import zmq

from tests.support.plans import Row, Setup, plan
from tests.support.stage import executor_for
from tests.support.tiny import tiny_model
from toka.config import Config
from toka.messages import Plan, StageReady, StepResult, Stop
from toka.sockets import open_socket, parse, send
from toka.trace import Recorder
from workers.stage.interface import AheadExecutor, AnyExecutor
from workers.stage.loop import serve
from workers.stage.manager import Manager


class Ahead:
    """A CPU executor that keeps its results until they are asked for."""

    def __init__(self, executor: AnyExecutor) -> None:
        self.executor, self.sizes, self.device, self.part = executor, executor.sizes, executor.device, executor.part
        self.results: list[StepResult] = []

    def execute(self, plan: Plan) -> StepResult:
        raise AssertionError("the loop waits for a step")

    def observe(self, trace: Recorder) -> None:
        self.trace = trace

    def submit(self, plan: Plan) -> None:
        self.results.append(self.executor.execute(plan))

    def collect(self) -> StepResult:
        return self.results.pop(0)


def test_results_come_in_the_order_of_plans(tmp_path: Path) -> None:
    executor = Ahead(executor_for(tiny_model(tmp_path / "model")))
    assert isinstance(executor, AheadExecutor)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans, results = open_socket(context, zmq.PUSH), open_socket(context, zmq.PULL)
    plans.bind(f"ipc://{tmp_path}/plans-0")
    results.bind(f"ipc://{tmp_path}/results")
    thread = Thread(target=serve, args=(executor, Manager(context, Config(run_dir=str(tmp_path)), 0)), daemon=True)
    thread.start()
    assert isinstance(parse(results.recv_multipart()), StageReady)
    for step in range(1, 30):
        setups, table = ([Setup(slot=0, temperature=0.0)], [(0, i, i) for i in range(8)]) if step == 1 else ([], [])
        rows = [Row(slot=0, start=step - 1, tokens=[7] if step == 1 else [-1], samples=[(0, step - 1)])]
        send(plans, plan(step=step, setups=setups, table=table, rows=rows))
    for step in range(1, 30):
        result = parse(results.recv_multipart())
        assert isinstance(result, StepResult) and result.step == step and len(result.tokens) == 1
    send(plans, Stop())
    thread.join(10)
    assert not thread.is_alive()
    context.destroy()


FAILING = """
import sys, zmq
from tests.workers.stage.test_loop import Ahead, Config, Manager, executor_for, serve, tiny_model
from pathlib import Path

class Failing(Ahead):
    def collect(self):
        raise RuntimeError("the GPU fell off")

folder = Path(sys.argv[1])
serve(Failing(executor_for(folder / "model")), Manager(zmq.Context(), Config(run_dir=str(folder)), 0))
"""


def test_a_failed_step_ends_the_process(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans, results = open_socket(context, zmq.PUSH), open_socket(context, zmq.PULL)
    plans.bind(f"ipc://{tmp_path}/plans-0")
    results.bind(f"ipc://{tmp_path}/results")
    child = subprocess.Popen([sys.executable, "-c", FAILING, str(tmp_path)], cwd=Path(__file__).parents[3])
    try:
        assert isinstance(parse(results.recv_multipart()), StageReady)
        send(plans, plan(step=1, setups=[Setup(slot=0)]))
        assert child.wait(20) == 1
    finally:
        child.kill()
        context.destroy()
