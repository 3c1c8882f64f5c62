"""A stage as a process: `python -m workers.stage`, started beside its manager with the number in TOKA_STAGE."""

from __future__ import annotations

import logging
import os
import signal
import sys

from toka import process
from toka.config import Config
from toka.model import open_model
from toka.placement import take_cores
from toka.trace import Recorder
from workers import endpoints
from workers.agreement import agreement


def main() -> None:
    take_cores()
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

    several = config.pp_size * config.tp_size > 1
    threads.before_torch(several)
    import zmq

    from workers.stage.build import CAPTURED, build, connect
    from workers.stage.loop import serve as run
    from workers.stage.manager import Manager
    from workers.stage.masks import ZmqMatcher
    from workers.stage.partition import take_seat
    from workers.stage.warm_up import warm_up

    threads.configure(config.threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    trace = Recorder("stage", f"stage {config.replica}.{stage}", on=bool(config.trace))
    with endpoints.admitting(context, config):
        manager = Manager(context, config, stage)
        common = agreement(config, open_model(config.model)) if config.rendezvous else {}
        seat = take_seat(config, stage, manager.meet(common) if several else "")
        executor = build(config, process.progress, seat)
        process.progress("warming up", CAPTURED)
        warm_up(executor)
        pipe = connect(executor, config, seat, context)
        matcher = ZmqMatcher(context, config, stage) if executor.part.last else None
        executor.matcher = matcher
        process.settle()
        sizes = executor.sizes
        process.ready(f"{sizes.pages * sizes.page_size} KV tokens on {executor.device}")
        try:
            run(executor, manager, trace, config.trace_kernels, pipe)
        finally:
            if pipe is not None:
                pipe.close()
            if matcher is not None:
                matcher.close()
            trace.leave(config.run_dir)
            manager.close()
    context.destroy()
    if several and executor.device.type == "cuda":
        # Communicators are taken down one by one, and wait for peers that are on their way out as well.
        logging.shutdown()
        os._exit(0)


if __name__ == "__main__":
    main()
