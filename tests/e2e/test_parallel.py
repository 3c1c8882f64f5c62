"""Several stages: the same tokens as transformers, however the model is cut, with the cache too small for all."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import SIZES
from tests.support.grammar_client import check, grammar_client
from tests.support.server import Server, running, serve
from tests.support.soak import count
from tests.support.tiny import VOCAB_SIZE

CACHE = {"kv_cache_tokens": 1024, "max_seqs": 12, "max_tokens_per_step": 128}
"""Not enough for all requests to their ends."""
Prompt = tuple[int, ...]


def prompts(number: int) -> list[Prompt]:
    """Of 1 to 150 ids, most of them behind one of three common beginnings."""
    draw = random.Random(number)
    begins = [tuple(draw.choices(range(3, VOCAB_SIZE), k=length)) for length in (0, 40, 100)]
    return [(*draw.choice(begins), *draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 50))) for _ in range(number)]


async def complete(client: httpx.AsyncClient, prompt: Prompt, tokens: int, leave: bool) -> str | None:
    """The text of a completion; where `leave`, the client goes away after its first tokens, and None."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": leave}
    if not leave:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                break
    return None


async def complete_all(server: Server, wanted: list[Prompt], tokens: int) -> dict[Prompt, str]:
    """All at once; every fourth client leaves, and is not among the answers."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
        work = (complete(client, prompt, tokens, leave=i % 4 == 3) for i, prompt in enumerate(wanted))
        answers = await asyncio.gather(*work)
    return {prompt: answer for prompt, answer in zip(wanted, answers) if answer is not None}


@pytest.mark.parametrize(
    "sizes",
    [{"pp_size": 2}, {"pp_size": 3}, {"tp_size": 2}, {"tp_size": 4}, {"pp_size": 2, "tp_size": 2}],
    ids=lambda sizes: " ".join(f"{key}={value}" for key, value in sizes.items()),
)
async def test_tokens_equal_transformers(
    folder: Path, greedy: Callable[[list[int], int], str], sizes: dict[str, int]
) -> None:
    with (
        tempfile.TemporaryDirectory() as private,
        serve(model=folder, broker=f"ipc://{private}/broker", **SIZES | CACHE | sizes) as server,
    ):
        answers = await complete_all(server, prompts(32), 40)
        assert len(answers) == 24
        for prompt, text in answers.items():
            assert text == greedy(list(prompt), 40)
        seeded = {"prompt": [5, 6, 7], "max_tokens": 12, "seed": 11, "logprobs": 2, "top_p": 0.9}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            twice = [(await client.post("/v1/completions", json=seeded)).json()["choices"] for _ in range(2)]
            assert twice[0] == twice[1] and len(twice[0][0]["logprobs"]["tokens"]) == 12
            assert (await client.get("/health")).status_code == 200
        if len(sizes) == 2:
            # Several steps on their way, and masks for two ranks of the last stage.
            async with grammar_client(f"ipc://{private}/broker", str(folder)) as grammars:
                await check(grammars)


@pytest.mark.soak
async def test_a_long_run_through_a_pipeline(folder: Path) -> None:
    """Requests that come and go: each is answered, in full, and equal ones alike."""
    number = count(120, 2000)
    with serve(model=folder, **SIZES | CACHE, pp_size=2) as server:
        wanted = prompts(number // 2)
        first = await complete_all(server, wanted, 24)
        assert first == await complete_all(server, wanted, 24)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"pp_size": 4}, "pp_size: 4 stages, but the model has 3 layers"),
        ({"tp_size": 3}, "tp_size: 3 does not divide the model's 4 attention heads"),
        ({"pp_size": 2, "pp_layers": "1,1"}, "pp_layers: '1,1' should be pp_size=2 numbers"),
    ],
)
def test_a_size_that_does_not_fit_ends_the_start(folder: Path, sizes: dict[str, object], says: str) -> None:
    with running("toka", model=folder, port=0, **SIZES, **sizes) as server:
        assert server.wait(60) != 0
        assert says in server.output
