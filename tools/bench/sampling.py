"""What drawing costs on a GPU, by option: `python -m tools.bench.sampling [rows=1,64,1024,4096] [hidden=2048] ...`.

A draw is the LM head of `hidden` inputs and everything after it, for all rows of a step; random weights, whose
logits have the standard deviation `spread`. Prints milliseconds, the median of `repeat` replays of a graph.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

OWN: dict[str, Any] = {"rows": "1,64,1024,4096", "vocabulary": 128_256, "hidden": 2048, "spread": 2.0, "repeat": 20}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence": 0.5, "repetition": 1.2, "prompt": range(1000), "outputs": range(500)},
    "bias": {"bias": dict.fromkeys(range(100), 1.0)},
    "logprob": {"logprobs": 0},
    "20 logprobs": {"logprobs": 20},
}


def milliseconds(run: Callable[[], None], repeat: int) -> float:
    import torch

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(repeat):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def measure(rows: int, options: dict[str, Any], own: dict[str, Any]) -> float:
    import torch

    from tests.support.plans import Setup, plan
    from workers.stage.cuda.draw import Draw
    from workers.stage.cuda.special import Special
    from workers.stage.layers import PlainLinear

    device, vocabulary = torch.device("cuda"), own["vocabulary"]
    torch.manual_seed(0)
    hidden = torch.randn(rows, own["hidden"], device=device, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, own["hidden"], device=device, dtype=torch.bfloat16)
    weight *= own["spread"] * own["hidden"] ** -0.5
    draw = Draw(PlainLinear(weight, None), range(vocabulary), torch.zeros(rows + 1, dtype=torch.int64, device=device))
    made = plan(setups=[Setup(slot=i, seed=i, **options) for i in range(rows)])
    draw.set_up(made)
    every, zeros = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32)
    if not options:
        slots, outputs = torch.from_numpy(every).to(device), torch.from_numpy(zeros).to(device)
        tokens = torch.empty_like(slots)
        return milliseconds(lambda: draw.draw(hidden, slots, outputs, tokens), own["repeat"])
    special = Special(draw, 2, rows)
    special.set_up(made)
    width = special.width(special.wanted(every))
    portion = special.sizes[-1]
    # One portion is captured, over and over: all that another would differ in is its upload.
    special.fill(every[:portion], every[:portion], zeros[:portion])

    def portions() -> None:
        for start in range(0, rows, portion):
            special.run(hidden, min(portion, rows - start), width)

    return milliseconds(portions, own["repeat"])


def main() -> None:
    given = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
    own = OWN | {key: type(OWN[key])(value) for key, value in given.items()}
    for rows in map(int, own["rows"].split(",")):
        costs = {name: round(measure(rows, options, own), 3) for name, options in OPTIONS.items()}
        print(json.dumps({"rows": rows, "ms": costs}), flush=True)


if __name__ == "__main__":
    main()
