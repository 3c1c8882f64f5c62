"""A stage's loop: plans in, results out, in order. It waits in zmq and nowhere else."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread

import zmq

from toka.messages import Plan, StageReady, Stop
from toka.sockets import open_socket, parse, send
from toka.trace import OFF, Recorder
from workers.stage.interface import AheadExecutor, AnyExecutor
from workers.stage.profile import Profile

log = logging.getLogger(__name__)


def serve(
    executor: AnyExecutor,
    stage: int,
    run_dir: str,
    context: zmq.Context[zmq.Socket[bytes]],
    trace: Recorder = OFF,
    trace_kernels: int = 0,
) -> None:
    """Say StageReady to the manager whose sockets are in `run_dir`, and execute its plans until it says Stop."""
    trace.name_track("loop")
    profile = Profile(trace, trace_kernels, executor.device)
    plans, results = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
    plans.connect(f"ipc://{run_dir}/plans-{stage}")
    results.connect(f"ipc://{run_dir}/results")
    sizes = executor.sizes
    ready = StageReady(stage=stage, pages=sizes.pages, max_seqs=sizes.max_seqs, max_tokens_per_step=sizes.max_tokens)
    send(results, ready)
    try:
        if isinstance(executor, AheadExecutor):
            executor.observe(trace)
            _run_ahead(executor, plans, results, trace, profile)
        else:
            for plan in _until_stop(plans):
                with trace.span("step", step=plan.step):
                    result = executor.execute(plan)
                send(results, result)
                profile.stepped()
    finally:
        profile.end()


def _until_stop(plans: zmq.Socket[bytes]) -> Iterator[Plan]:
    while not isinstance(message := parse(plans.recv_multipart()), Stop):
        if isinstance(message, Plan):
            yield message
        elif message is not None:
            log.warning("message dropped: not for a stage", extra={"message": type(message).__name__})


def _run_ahead(
    executor: AheadExecutor,
    plans: zmq.Socket[bytes],
    results: zmq.Socket[bytes],
    trace: Recorder,
    profile: Profile,
) -> None:
    """Launch plans as they come, while a thread sends what the GPU gives back."""
    launched: SimpleQueue[bool] = SimpleQueue()
    sender = Thread(target=_send_results, args=(executor, results, launched, trace), daemon=True)
    sender.start()
    try:
        for plan in _until_stop(plans):
            executor.submit(plan)
            launched.put(True)
            profile.stepped()
    finally:
        launched.put(False)
        sender.join()


def _send_results(
    executor: AheadExecutor, results: zmq.Socket[bytes], launched: SimpleQueue[bool], trace: Recorder
) -> None:
    trace.name_track("results")
    try:
        while launched.get():
            with trace.span("collect"):
                result = executor.collect()
            with trace.span("send"):
                send(results, result)
    except BaseException:
        # The loop waits for plans that will not come: without results, none are made.
        log.exception("a step failed")
        os._exit(1)
