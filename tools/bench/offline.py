"""Throughput without a server: `python -m tools.bench.offline [shape=llama-1b] [workload=sharegpt:6000,monkeys] ...`.

The same requests go three ways: straight, as `tools.bench.serve` sends them over HTTP; through `toka-batch` to the same
server; and through `toka.LLM`, which starts one of its own. For each workload a line of JSON: output tokens a second
and requests a second of each, the ratio to the straight way, and the CPU seconds of the program that sends: requests
by these are what it could do at most. Times are from the first request to the last answer; of `toka-batch` the whole
command, its start and its reading of the input included.

`stage=null`: without a model, to see what the ways can do at most. Every other `key=value` is a setting of Toka, e.g.
`device=cuda frontends=4`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import toka
from toka.model import open_model
from toka.process import HOME
from tools.bench import serve
from tools.bench.client import LoadError
from tools.bench.gpu import shape_folder
from tools.bench.null_stage import MODULE as NULL_SERVER
from tools.bench.servers import running
from tools.bench.workloads import SHAPES, Request, named

Way = dict[str, float]


class NullLLM(toka.LLM):
    launcher = NULL_SERVER


def through_llm(llm: toka.LLM, requests: Sequence[Request]) -> Way:
    params = [_params(each) for each in requests]
    began, before = time.monotonic(), time.process_time()
    outputs = llm.generate([each.prompt for each in requests], params)
    seconds, cpu = time.monotonic() - began, time.process_time() - before
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    return _way(requests, counts, seconds) | {"cpu_seconds": round(cpu, 2)}


def through_batch(url: str, requests: Sequence[Request], folder: Path) -> Way:
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    output.unlink(missing_ok=True)
    with source.open("w") as file:
        for number, each in enumerate(requests):
            body = _params(each).completion(each.prompt) | {"return_token_ids": False}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    began, before = time.monotonic(), _children_seconds()
    command = [sys.executable, "-m", "toka.batch", str(source), str(output), f"url={url}"]
    subprocess.run(command, check=True, cwd=HOME)
    seconds, cpu = time.monotonic() - began, _children_seconds() - before
    answers = {int(each["custom_id"]): each for each in map(json.loads, output.read_text().splitlines())}
    counts = [answers[i]["response"]["body"]["usage"]["completion_tokens"] for i in range(len(requests))]
    return _way(requests, counts, seconds) | {"cpu_seconds": round(cpu, 2)}


def _children_seconds() -> float:
    """CPU time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _params(request: Request) -> toka.SamplingParams:
    stops: dict[str, Any] = {"stop_token_ids": request.stop_ids} if request.stop_ids else {"ignore_eos": True}
    return toka.SamplingParams(max_tokens=request.outputs, temperature=1.0, **stops)


def _way(requests: Sequence[Request], counts: Sequence[int], seconds: float) -> Way:
    for request, count in zip(requests, counts, strict=True):
        if count > request.outputs or (count < request.outputs and not request.stop_ids):
            raise LoadError(f"{count} tokens came, {request.outputs} were asked for")
    return {
        "output_tokens_per_s": round(sum(counts) / seconds),
        "requests_per_s": round(len(requests) / seconds),
        "seconds": round(seconds, 2),
    }


def measure(own: Mapping[str, str], settings: dict[str, Any], folder: Path) -> None:
    if "model" not in settings:
        made = shape_folder(own["shape"], folder)
        serve.write_tokenizer(made, SHAPES[own["shape"]]["vocab_size"])
        settings |= {"model": str(made), "weights": "random"}
    workloads = named(own["workload"], open_model(settings["model"]).config.vocab_size)
    ways: dict[str, dict[str, Way]] = {name: {} for name in workloads}
    given = [f"{key}={value}" for key, value in settings.items()]
    with running("toka", serve.launch(own["stage"], given)) as server:
        for name, requests in workloads.items():
            straight = serve.run(server, requests, int(own["clients"]))
            ways[name]["straight"] = _way(requests, [each.outputs for each in requests], straight["seconds"])
            ways[name]["straight"]["output_tokens_per_s"] = straight["output_tokens_per_s"]
            ways[name]["toka-batch"] = through_batch(server.url, requests, folder)
    with (NullLLM if own["stage"] == "null" else toka.LLM)(**settings) as llm:
        for name, requests in workloads.items():
            ways[name]["toka.LLM"] = through_llm(llm, requests)
    for name, found in ways.items():
        straight_rate = found["straight"]["output_tokens_per_s"]
        for way in found.values():
            way["of_straight"] = round(way["output_tokens_per_s"] / straight_rate, 3)
        print(json.dumps({"workload": name, "frontends": int(settings.get("frontends", "1")), **found}), flush=True)


def main() -> None:
    given = dict(arg.partition("=")[::2] for arg in sys.argv[1:])
    own = serve.OWN | {key: value for key, value in given.items() if key in serve.OWN}
    settings = {key: value for key, value in given.items() if key not in serve.OWN}
    with tempfile.TemporaryDirectory() as folder:
        measure(own, settings, Path(folder))


if __name__ == "__main__":
    main()
