"""Who asks for how many tokens at a time, and how long it is silent before it asks again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import zmq

from frontend import engine as module
from frontend.engine import Engine
from frontend.generation import WHOLE_DELIVERY, Call, Generation
from frontend.sample import Sample
from tests.support.demo import peer_text
from tests.support.engine_peer import EnginePeer
from toka.messages import Accepted, Finish, Resume, SamplingParams, Submit, Work, decode


class Silent:
    """Stands in for a detokenizer."""

    def feed(self, ids: Any) -> str:
        return ""

    flush = staticmethod(str)


@pytest.mark.parametrize(
    ("fields", "delivery"),
    [({}, WHOLE_DELIVERY), ({"logprobs": 1}, WHOLE_DELIVERY), ({"stream": True}, 1), ({"stop": ["never"]}, 1)],
)
def test_tokens_are_asked_for_one_by_one_where_each_is_looked_at(
    http: httpx.Client, peer: EnginePeer, fields: dict[str, Any], delivery: int
) -> None:
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, **fields}).status_code == 200
    (submit,) = peer.of(Submit)
    work = decode(submit.payload)
    assert isinstance(work, Work) and work.delivery == delivery


def test_an_answer_of_rows_of_many_tokens(http: httpx.Client, peer: EnginePeer) -> None:
    peer.chunk = 7
    body = {"prompt": "x", "max_tokens": 60, "seed": 9, "n": 2, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == [peer_text(9, sample, 60) for sample in range(2)]
    assert answer["usage"]["completion_tokens"] == 120


@contextlib.asynccontextmanager
async def serving(peer: EnginePeer) -> AsyncIterator[Engine]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = Engine(context, peer.endpoint)
    running = asyncio.create_task(engine.run())
    try:
        await engine.met.wait()
        yield engine
    finally:
        running.cancel()
        await asyncio.wait([running])
        context.term()


def call(delivery: int, prompts: int = 1) -> Call:
    made = Call(streaming=False)
    for _ in range(prompts):
        Generation(
            prompt=np.ones(1, np.int32),
            params=SamplingParams(max_tokens=4),
            samples=[Sample(0, 0, Silent(), [], False)],
            priority=0,
            delivery=delivery,
            call=made,
        )
    return made


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(module, "QUIET_WHOLE_SECONDS", 30.0)


async def test_a_whole_answer_may_be_silent_for_longer_than_one_that_is_awaited_token_by_token(hasty: None) -> None:
    with EnginePeer(paused=True) as peer:
        async with serving(peer) as engine:
            calls = whole, awaited = call(64), call(1)
            for each in calls:
                await engine.submit(each)
                await each.wait_accepted()
            await asyncio.to_thread(peer.wait_for, Resume)
            assert {resume.request for resume in peer.of(Resume)} == {awaited.generations[0].id}
            for each in calls:
                engine.close(each)
    assert whole.generations[0].quiet == 30.0


async def test_a_whole_answer_that_nobody_accepted_is_submitted_again(hasty: None) -> None:
    with EnginePeer(deaf=False, paused=True) as peer:
        async with serving(peer) as engine:
            peer.deaf = True
            lost = call(64)
            await engine.submit(lost)
            await asyncio.to_thread(peer.wait_for, Submit, 2)
            engine.close(lost)
    assert not peer.of(Accepted)


async def test_only_so_many_are_asked_for_at_once(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASKED_AT_ONCE", 3)
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.3)
    with EnginePeer(paused=True) as peer:
        async with serving(peer) as engine:
            many = call(1, prompts=6)
            await engine.submit(many)
            await many.wait_accepted()
            await asyncio.to_thread(peer.wait_for, Resume, 3)
            assert len(peer.of(Resume)) == 3
            await asyncio.to_thread(peer.wait_for, Resume, 6)
            assert len({resume.request for resume in peer.of(Resume)}) == 6
            engine.close(many)


async def test_what_was_aborted_while_it_was_sent_is_sent_no_further() -> None:
    with EnginePeer() as peer:
        async with serving(peer) as engine:
            calls = aborted, other = call(1, prompts=2), call(1)
            aborted.end(Finish.ABORT)
            for each in calls:
                await engine.submit(each)
                await each.wait_accepted()
                engine.close(each)
            assert [submit.request for submit in peer.of(Submit)] == [other.generations[0].id] and not len(engine)
