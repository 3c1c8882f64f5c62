"""Toka: a throughput-first LLM inference server. This package holds what its processes share.

config      every setting, declared once
messages    every message that crosses a socket, and its encoding
sockets     ZeroMQ sockets with the same options everywhere
process     what every part does as a process: command line, name, logs, what it tells its supervisor
supervisor  starts parts, restarts the ones that die, ends them in order (`child`: one of them)
launcher    `toka`, the whole server on one machine
model       finds a model and reads its config, tokenizer and tensors, without torch
text        tokens to text and back
llm         `toka.LLM`, the offline API, and what goes into it and comes out of it (`params`, `outputs`)
batch       `toka-batch`

`toka.LLM`, `toka.SamplingParams` and what goes with them are imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toka.llm import LLM
    from toka.outputs import Choice, GenerationError, Output, TokenLogprob, Usage
    from toka.params import SamplingParams

__all__ = ["LLM", "Choice", "GenerationError", "Output", "SamplingParams", "TokenLogprob", "Usage"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'toka' has no attribute {name!r}")
    module = {"LLM": "llm", "SamplingParams": "params"}.get(name, "outputs")
    return getattr(importlib.import_module(f"toka.{module}"), name)
