"""A stage as a process: `python -m workers.stage`, started beside its manager with the number in TOKA_STAGE."""

from __future__ import annotations

import gc
import os
import signal
import sys

from toka import process
from toka.config import Config

LAST_OF_WEIGHTS = 0.8
"""Fraction of the start that is done when the weights are loaded."""


def main() -> None:
    config = process.command_line("toka-stage", "runs the model for one replica's manager", "worker")
    stage = int(os.environ.get("TOKA_STAGE", "0"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    process.begin("stage", f"toka: stage {config.replica}.{stage}", config)
    try:
        serve(config, stage)
    except ValueError as error:
        process.fail(str(error))


def serve(config: Config, stage: int) -> None:
    """Load, warm up, and execute plans; ValueError, in one sentence, where the settings or the model do not fit."""
    if not config.run_dir:
        raise ValueError("run_dir: a stage needs the folder of its manager's sockets")
    process.progress("loading torch", 0.0)
    from workers.stage import threads

    threads.before_torch()
    import zmq

    from workers.stage.build import build
    from workers.stage.loop import serve as run
    from workers.stage.warm_up import warm_up

    threads.configure(config.threads)
    executor = build(config, lambda done: process.progress("loading weights", done * LAST_OF_WEIGHTS))
    process.progress("warming up", LAST_OF_WEIGHTS)
    warm_up(executor)
    # What is loaded by now stays: collections need not look at it again.
    gc.collect()
    gc.freeze()
    sizes = executor.sizes
    process.ready(f"{sizes.pages * sizes.page_size} KV tokens on {executor.device}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        run(executor, stage, config.run_dir, context)
    finally:
        context.destroy()


if __name__ == "__main__":
    main()
