"""Requests with a grammar to a real server, as a frontend sends them: HTTP has other ways to ask for one."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import zmq

from frontend.engine import Engine
from frontend.generation import Call, Generation
from frontend.sample import Sample
from tests.support.matching import regex
from toka.messages import SamplingParams
from toka.model import open_model
from toka.text.detokenize import detokenizer
from toka.text.vocabulary import Vocabulary


class GrammarClient:
    """Beside the server's own frontends, at its broker."""

    def __init__(self, broker: str, model: str = "") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engine = Engine(self.context, broker)
        self.tokenizer = open_model(model).tokenizer()
        self._vocabulary = Vocabulary(self.tokenizer)

    def call(self, prompt: Sequence[int], *, n: int = 1, delivery: int = 1, **params: Any) -> Call:
        """One generation of `n` samples, to be awaited with `finish`."""
        call = Call(streaming=True)
        samples = [Sample(i, i, detokenizer(self._vocabulary), (), False) for i in range(n)]
        Generation(
            prompt=np.array(prompt, np.int32),
            params=SamplingParams(**{"max_tokens": 200, "seed": 1} | params),
            samples=samples,
            priority=0,
            delivery=delivery,
            call=call,
        )
        return call

    async def finish(self, call: Call) -> list[list[int]]:
        """Submit it and wait for its end: the ids of its samples. ApiError where it is refused."""
        try:
            await self.engine.submit(call)
            while not call.done:
                await call.wait()
            return [sample.ids for sample in call.generations[0].samples]
        finally:
            self.engine.close(call)

    async def generate(self, prompt: Sequence[int], **options: Any) -> list[list[int]]:
        return await self.finish(self.call(prompt, **options))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))


@contextlib.asynccontextmanager
async def grammar_client(broker: str, model: str = "") -> AsyncIterator[GrammarClient]:
    client = GrammarClient(broker, model)
    running = asyncio.create_task(client.engine.run())
    try:
        # Nothing is sent before; what is sent then waits at the broker for a replica.
        await asyncio.wait_for(client.engine.met.wait(), 60)
        yield client
    finally:
        # What the end of the last call has to tell the broker.
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        client.context.destroy(linger=0)


PROMPTS = [[5 + i, *range(20, 20 + 7 * i)] for i in range(8)]


async def check(client: GrammarClient, n: int = 2, times: int = 3) -> None:
    """Requests with a grammar between others, all at once: those match, these come to their ends.

    times: how often a pattern of some ten tokens comes in each.
    """
    pattern = f"([ab]{{3,9}}-[0-9]{{1,5}}x){{{times}}}"
    bound = [
        client.generate(prompt, n=n, seed=i, max_tokens=20 * times, grammar=regex(pattern))
        for i, prompt in enumerate(PROMPTS)
    ]
    free = [client.generate(prompt, seed=9, max_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    done = await asyncio.gather(*bound, *free)
    for samples in done[: len(bound)]:
        assert all(re.fullmatch(pattern, client.text(ids)) for ids in samples)
    assert all(len(ids) == 20 for samples in done[len(bound) :] for ids in samples)
