"""The real server: tiny weights in float32, where every token can be known beforehand."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch

from tests.support.server import Server, serve
from tests.support.tiny import tiny_model

SIZES = {"max_seqs": 16, "kv_cache_tokens": 16384, "threads": 1}
SMALL = {"max_context": 128, "max_n": 4, "max_samples": 8, "max_seqs": 4, "kv_cache_tokens": 512, "threads": 1}
"""No request takes long, and a few of them fill the cache."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def broker() -> Iterator[str]:
    """The address of the server's broker; a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{folder}/broker"


@pytest.fixture(scope="session")
def server(folder: Path, broker: str) -> Iterator[Server]:
    with serve(model=folder, ping_seconds=0.3, broker=broker, **SIZES) as running:
        yield running


@pytest.fixture(scope="session")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With files and batches."""
    with serve(model=folder, data_dir=tmp_path_factory.mktemp("data"), **SMALL) as running:
        yield running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
def lenient(server: Server) -> Iterator[openai.OpenAI]:
    """For streamed completions: the client's strict model has no null finish_reason, which OpenAI itself sends."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def greedy(folder: Path) -> Callable[[list[int], int], str]:
    """The text that transformers generates greedily for prompt ids, specials left out."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def generate(ids: list[int], count: int) -> str:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=count, do_sample=False,
            )  # fmt: skip
        return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))

    return generate
