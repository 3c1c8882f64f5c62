"""A stage's loop: plans in, results out, in order. It waits for other processes and for nothing else."""

from __future__ import annotations

import logging
import os
import time
from queue import SimpleQueue
from threading import Thread

from toka.messages import StageLoad, StageReady
from toka.trace import OFF, Recorder
from workers.stage.executor import Executor
from workers.stage.interface import AheadExecutor, AnyExecutor
from workers.stage.manager import Manager
from workers.stage.pipe import ZmqPipe
from workers.stage.profile import Profile

log = logging.getLogger(__name__)

LOAD_SECONDS = 1.0
"""How often a stage says how busy it is."""


def serve(
    executor: AnyExecutor,
    manager: Manager,
    trace: Recorder = OFF,
    trace_kernels: int = 0,
    pipe: ZmqPipe | None = None,
) -> None:
    """Say StageReady to the manager, and execute its plans until it says Stop.

    pipe: to the other stages of a pipeline, not connected yet.
    """
    trace.name_track("loop")
    profile = Profile(trace, trace_kernels, executor.device)
    sizes = executor.sizes
    manager.send(
        StageReady(
            stage=manager.stage,
            pages=sizes.pages,
            max_seqs=sizes.max_seqs,
            max_tokens_per_step=sizes.max_tokens,
            inbox=pipe.endpoint if pipe else "",
        )
    )
    try:
        if pipe is not None:
            pipe.connect(manager.peers())
        if isinstance(executor, AheadExecutor):
            executor.observe(trace)
            _run_ahead(executor, manager, trace, profile)
        else:
            assert isinstance(executor, Executor)
            _run(executor, manager, trace, profile)
    finally:
        profile.end()


def _run(executor: Executor, manager: Manager, trace: Recorder, profile: Profile) -> None:
    """Execute plan by plan."""
    load = _Load(manager)
    for plan in manager.plans():
        began, waited = time.perf_counter(), executor.waited
        with trace.span("step", step=plan.step):
            result = executor.execute(plan)
        load.add(time.perf_counter() - began - (executor.waited - waited))
        if executor.part.answers:
            assert result is not None
            manager.send(result)
        profile.stepped()


class _Load:
    """Tells the manager about once a second how much of the time this stage computes."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._busy, self._since = 0.0, time.perf_counter()

    def add(self, seconds: float) -> None:
        self._busy += seconds
        passed = time.perf_counter() - self._since
        if passed >= LOAD_SECONDS:
            self._manager.send(StageLoad(stage=self._manager.stage, busy=self._busy / passed))
            self._busy, self._since = 0.0, time.perf_counter()


def _run_ahead(executor: AheadExecutor, manager: Manager, trace: Recorder, profile: Profile) -> None:
    """Launch plans as they come, while a thread sends what the GPU gives back."""
    launched: SimpleQueue[bool] = SimpleQueue()
    sender = Thread(target=_send_results, args=(executor, manager, launched, trace), daemon=True)
    sender.start()
    try:
        for plan in manager.plans():
            executor.submit(plan)
            launched.put(True)
            profile.stepped()
    finally:
        launched.put(False)
        sender.join()


def _send_results(executor: AheadExecutor, manager: Manager, launched: SimpleQueue[bool], trace: Recorder) -> None:
    trace.name_track("results")
    load = _Load(manager)
    try:
        while launched.get():
            with trace.span("collect"):
                result = executor.collect()
            load.add(result.busy_us / 1e6)
            if executor.part.answers:
                with trace.span("send"):
                    manager.send(result)
    except BaseException:
        # The loop waits for plans that will not come: without results, none are made.
        log.exception("a step failed")
        os._exit(1)
