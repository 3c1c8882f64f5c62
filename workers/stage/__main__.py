"""A stage as a process: `python -m workers.stage`, started beside its manager with the number in TOKA_STAGE."""

from __future__ import annotations

import os
import signal
import sys

from toka import process
from toka.config import Config
from toka.trace import Recorder


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

    from workers.stage.build import CAPTURED, build
    from workers.stage.loop import serve as run
    from workers.stage.warm_up import warm_up

    threads.configure(config.threads)
    executor = build(config, process.progress)
    process.progress("warming up", CAPTURED)
    warm_up(executor)
    process.settle()
    sizes = executor.sizes
    process.ready(f"{sizes.pages * sizes.page_size} KV tokens on {executor.device}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    trace = Recorder("stage", f"stage {config.replica}.{stage}", on=bool(config.trace))
    try:
        run(executor, stage, config.run_dir, context, trace, config.trace_kernels)
    finally:
        trace.leave(config.run_dir)
        context.destroy()


if __name__ == "__main__":
    main()
