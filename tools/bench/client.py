"""The load client: concurrent completions, counted by the server's own usage.

It shares the machine's cores with the server it measures, so it reads only what it needs: of a stream the arrival
time of each chunk, and the usage in the last one.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

ROUND_SECONDS = 600.0
"""The longest a round may take."""
FIRST_ID, LAST_ID = 1_000, 40_000
"""Random prompt ids lie here: no special token in any vocabulary we serve."""
WORDS = (
    *("the", "sun", "light", "of", "a", "long", "road", "to", "our", "old", "house"),
    *("by", "that", "small", "lake", "was", "warm", "and", "very", "good", "for", "all"),
)


@dataclass(frozen=True)
class Request:
    """One request: where it goes, its JSON body, and the output tokens it must bring."""

    path: str
    body: dict[str, Any]
    tokens: int


@dataclass(frozen=True)
class Answer:
    """One answer as it arrived; times in seconds on one clock."""

    sent: float
    arrivals: tuple[float, ...]
    """When each chunk with text arrived; of an answer that is no stream, when all of it did."""
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:])]


@dataclass(frozen=True)
class Round:
    """Requests that were sent at once, from the first sent to the last answered."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: float
    """Median seconds to the first chunk."""
    itl: float
    """Median seconds between two chunks of a stream."""

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


class LoadError(RuntimeError):
    """A server did not do the work that was asked for, so that a figure would mean nothing."""


def random_prompts(count: int, length: int, seed: str, prefix: Sequence[int] = ()) -> list[list[int]]:
    """`count` prompts of `length` random ids each, behind `prefix`; the same for the same seed."""
    draw = random.Random(seed)
    return [[*prefix, *draw.choices(range(FIRST_ID, LAST_ID), k=length)] for _ in range(count)]


def completion(model: str, prompt: Sequence[int], tokens: int, temperature: float = 0.0) -> Request:
    """A completion of exactly `tokens` tokens for prompt ids."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request("/v1/completions", body, tokens)


def batch_completion(model: str, prompts: Sequence[Sequence[int]], tokens: int) -> Request:
    """One request for exactly `tokens` tokens after each of `prompts`, answered at once, not streamed."""
    body = completion(model, [], tokens).body | {"prompt": [list(prompt) for prompt in prompts], "stream": False}
    del body["stream_options"]
    return Request("/v1/completions", body, tokens * len(prompts))


def text_completion(model: str, words: int, tokens: int, seed: str) -> Request:
    """The same for `transformers serve`, which takes no ids: a prompt of `words` common words, a token each."""
    prompt = " ".join(random.Random(seed).choices(WORDS, k=words))
    exactly = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": True}
    return Request("/v1/completions", {**body, "generation_config": json.dumps(exactly)}, tokens)


def run_round(url: str, requests: Sequence[Request]) -> Round:
    """Send all requests at once, wait for all, and sum up.

    Raises LoadError where a server refuses a request, stops in mid-stream, or answers another number of tokens.
    """
    return asyncio.run(_round(url, requests))


async def _round(url: str, requests: Sequence[Request]) -> Round:
    connector = aiohttp.TCPConnector(limit=0)
    limits = aiohttp.ClientTimeout(total=ROUND_SECONDS)
    async with aiohttp.ClientSession(url, connector=connector, timeout=limits) as session:
        begun = time.perf_counter()
        try:
            answers = await asyncio.gather(*(_answer(session, request) for request in requests))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LoadError(f"{url}: {error or type(error).__name__}") from error
        return summarise(answers, time.perf_counter() - begun)


def summarise(answers: Sequence[Answer], seconds: float) -> Round:
    return Round(
        seconds=seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        output_tokens=sum(answer.output_tokens for answer in answers),
        ttft=statistics.median(answer.ttft for answer in answers),
        itl=statistics.median([gap for answer in answers for gap in answer.gaps] or [0.0]),
    )


async def _answer(session: aiohttp.ClientSession, request: Request) -> Answer:
    sent = time.perf_counter()
    async with session.post(request.path, json=request.body) as response:
        if response.status != 200:
            raise LoadError(f"{request.path}: {response.status} {(await response.text())[:300]}")
        read = _read_stream if request.body["stream"] else _read_whole
        arrivals, usage = await read(request.path, response)
    if usage["completion_tokens"] != request.tokens:
        raise LoadError(f"{request.path}: {usage['completion_tokens']} tokens came, {request.tokens} were asked for")
    return Answer(sent, tuple(arrivals), usage["prompt_tokens"], usage["completion_tokens"])


async def _read_whole(path: str, response: aiohttp.ClientResponse) -> tuple[list[float], dict[str, int]]:
    answer = await response.json()
    return [time.perf_counter()], answer["usage"]


async def _read_stream(path: str, response: aiohttp.ClientResponse) -> tuple[list[float], dict[str, int]]:
    """When each chunk arrived, and the usage."""
    arrivals: list[float] = []
    usage: dict[str, int] | None = None
    async for line in response.content:
        data = line.removeprefix(b"data:")
        if len(data) == len(line) or data.strip() == b"[DONE]":
            continue
        now = time.perf_counter()
        if b'"choices"' not in data:
            raise LoadError(f"{path}: {data[:300].decode(errors='replace')}")
        if b'"usage"' in data:
            chunk = json.loads(data)
            usage = chunk["usage"] or usage
            if not any(choice["text"] for choice in chunk["choices"]):
                continue
        arrivals.append(now)
    if usage is None or not arrivals:
        raise LoadError(f"{path}: the stream ended before its usage")
    return arrivals, usage
