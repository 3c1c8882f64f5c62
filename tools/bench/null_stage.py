"""A stage without a model, for figures of everything around it: draws random ids, as fast as plans come.

`python -m tools.bench.null_stage` is `toka` with this stage, and takes the same settings.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import zmq

from toka import launcher, process
from toka.config import Config
from toka.messages import Plan, StageReady, StepResult, Stop
from toka.model import open_model
from toka.sockets import open_socket, parse, send

MAX_SEQS = 4096
MAX_TOKENS = 8192
KV_CACHE_TOKENS = 4_000_000
MODULE = "tools.bench.null_stage"


def serve(config: Config) -> None:
    """Answer every plan at once, until Stop. Log-probabilities are not made up: nobody may ask for them."""
    seqs = config.max_seqs or MAX_SEQS
    ready = StageReady(
        stage=0,
        pages=(config.kv_cache_tokens or KV_CACHE_TOKENS) // config.page_size,
        max_seqs=seqs,
        max_tokens_per_step=config.max_tokens_per_step or max(MAX_TOKENS, seqs),
    )
    vocabulary, rng = open_model(config.model).config.vocab_size, np.random.default_rng(0)
    none = np.empty(0, np.float32)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans, results = open_socket(context, zmq.PULL), open_socket(context, zmq.PUSH)
    plans.connect(f"ipc://{config.run_dir}/plans-0")
    results.connect(f"ipc://{config.run_dir}/results")
    send(results, ready)
    process.ready("no model")
    while not isinstance(message := parse(plans.recv_multipart()), Stop):
        assert isinstance(message, Plan)
        ids = rng.integers(0, vocabulary, len(message.sample_slots), np.int32)
        result = StepResult(step=message.step, busy_us=1, tokens=ids, chosen=none, top_ids=ids[:0], top_values=none)
        send(results, result)
    context.destroy()


def main() -> None:
    if "TOKA_STAGE" not in os.environ:
        launcher.main(MODULE)
    config = process.command_line("null-stage", "a stage without a model", "worker")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    process.begin("stage", f"toka: stage {config.replica}.0", config)
    serve(config)


if __name__ == "__main__":
    main()
