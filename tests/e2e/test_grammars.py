"""Outputs with a grammar through real processes: whatever dies on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from frontend.errors import ApiError
from tests.support.grammar_client import check, grammar_client
from tests.support.matching import lark, regex
from tests.support.server import Server
from toka.messages import Finish


@pytest.mark.parametrize("part", ["matcher r0", "stage r0.0"])
async def test_a_part_that_is_killed_loses_nothing(server: Server, folder: Path, broker: str, part: str) -> None:
    victim = server.part(f"toka: {part}")
    async with grammar_client(broker, str(folder)) as client:
        working = asyncio.create_task(check(client, n=6, times=12))
        await asyncio.sleep(0.4)
        assert not working.done()
        victim.kill()
        await asyncio.wait_for(working, 60)
        again = server.part(f"toka: {part}")
        assert again.pid != victim.pid


async def test_a_grammar_that_is_none_is_refused(server: Server, folder: Path, broker: str) -> None:
    async with grammar_client(broker, str(folder)) as client:
        with pytest.raises(ApiError) as refused:
            await client.generate([5, 6], grammar=regex("(a"))
        assert refused.value.status == 400
        with pytest.raises(ApiError, match="characters"):
            await client.generate([5, 6], grammar="x" * 300_000)


async def test_one_that_fails_on_the_way_ends_its_request(server: Server, folder: Path, broker: str) -> None:
    ambiguous = lark('start: e\ne: e e | e e e | "a" | e "b"')
    async with grammar_client(broker, str(folder)) as client:
        call = client.call([5, 6], n=2, max_tokens=400, min_tokens=399, grammar=ambiguous)
        with pytest.raises(ApiError, match="the grammar cannot be followed") as refused:
            await asyncio.wait_for(client.finish(call), 30)
        assert refused.value.status == 400
        assert all(len(sample.ids) > 20 and sample.finish == Finish.NONE for sample in call.generations[0].samples)
        await check(client)


async def test_one_that_is_abandoned_leaves_the_replica_at_work(server: Server, folder: Path, broker: str) -> None:
    async with grammar_client(broker, str(folder)) as client:
        for seconds in (0.02, 0.1):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.generate([5], n=8, max_tokens=3000, grammar=regex("a*b" * 99)), seconds)
        await check(client)
