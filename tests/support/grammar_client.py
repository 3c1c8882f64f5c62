"""Requests with a grammar to a real server, as a frontend sends them: HTTP has other ways to ask for one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import zmq

from frontend.engine import Engine
from frontend.generation import Call, Generation
from frontend.sample import Sample
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
