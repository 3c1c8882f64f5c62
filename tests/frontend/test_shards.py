"""How a prompt and its samples are put before the broker: shards, and keys of the prompt's pages."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import zmq

from frontend.engine import Engine
from frontend.generation import Call, Generation
from frontend.sample import Sample
from tests.support.demo import demo_tokenizer
from tests.support.engine_peer import CARD, EnginePeer
from toka.messages import SamplingParams, State, Submit
from toka.page_keys import page_keys, split
from toka.text.detokenize import detokenizer
from toka.text.vocabulary import Vocabulary

PROMPT = np.arange(3, 43, dtype=np.int32)


@dataclasses.dataclass
class Spread(EnginePeer):
    share: int = 0

    def _state(self) -> State:
        return dataclasses.replace(super()._state(), share=self.share)


async def submitted(peer: Spread, samples: int, shards: int) -> tuple[list[Submit], Call]:
    """What comes of a call of so many samples; and the call, when all have finished."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = Engine(context, peer.endpoint)
    running = asyncio.create_task(engine.run())
    call = Call(streaming=False)
    vocabulary = Vocabulary(demo_tokenizer())
    Generation(
        prompt=PROMPT,
        params=SamplingParams(max_tokens=2, ignore_eos=True),
        samples=[Sample(number, number, detokenizer(vocabulary), [], False) for number in range(samples)],
        priority=0,
        delivery=64,
        call=call,
    )
    try:
        await engine.met.wait()
        await engine.submit(call)
        await call.wait_accepted()
        await call.wait()
        return peer.of(Submit), call
    finally:
        engine.close(call)
        running.cancel()
        await asyncio.wait([running])
        context.term()


@pytest.mark.parametrize(("share", "sizes"), [(0, [64, 36]), (200, [64, 36]), (30, [30, 30, 30, 10])])
async def test_shards_are_no_larger_than_the_broker_wants_them(share: int, sizes: list[int]) -> None:
    with Spread(share=share) as peer:
        submits, call = await submitted(peer, 100, len(sizes))
    assert [each.sequences for each in submits] == sizes
    assert [each.first_sample for each in submits] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert call.pending == 0 and call.left == 0


async def test_a_prompt_has_keys_where_there_are_replicas_to_choose_from() -> None:
    with Spread(replicas=1) as peer:
        [alone], _ = await submitted(peer, 1, 1)
    assert alone.page_hashes == b""
    with Spread(replicas=2) as peer:
        [chosen], _ = await submitted(peer, 1, 1)
    assert split(chosen.page_hashes) == page_keys(PROMPT, CARD.page_size) and len(PROMPT) // CARD.page_size == 2
