"""A stage's loop: plans in, results out, in order. It waits in zmq and nowhere else."""

from __future__ import annotations

import logging

import zmq

from toka.messages import Plan, StageReady, Stop
from toka.sockets import open_socket, parse, send
from workers.stage.executor import Executor

log = logging.getLogger(__name__)


def serve(executor: Executor, stage: int, run_dir: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Say StageReady to the manager whose sockets are in `run_dir`, and execute its plans until it says Stop."""
    plans, results = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
    plans.connect(f"ipc://{run_dir}/plans-{stage}")
    results.connect(f"ipc://{run_dir}/results")
    sizes = executor.sizes
    ready = StageReady(stage=stage, pages=sizes.pages, max_seqs=sizes.max_seqs, max_tokens_per_step=sizes.max_tokens)
    send(results, ready)
    while True:
        message = parse(plans.recv_multipart())
        if isinstance(message, Plan):
            send(results, executor.execute(message))
        elif isinstance(message, Stop):
            return
        elif message is not None:
            log.warning("message dropped: not for a stage", extra={"message": type(message).__name__})
