"""Grammars that mean harm: each is refused in time, and the loop and the next grammar do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from frontend.errors import ApiError
from frontend.grammar_check import MOST_WAITING, TOO_MUCH, GrammarChecker

IDS = 49_152


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(IDS)
    yield checker
    await checker.close()


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def schema(value: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def chain(count: int, last: Any, link: Any) -> str:
    links = {f"d{number}": link({"$ref": f"#/$defs/d{number + 1}"}) for number in range(count)}
    return schema({"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": last}})


def rules(count: int) -> str:
    return lark("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(count)) + f'\nr{count}: "a"')


HARMFUL = {
    "deep": ('{"grammars":[{"json_schema":' + '{"items":' * 9000 + "{}" + "}" * 9000 + "}]}", "nested too deeply"),
    "parentheses": (lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000), "too deeply nested"),
    "rules": (rules(5000), TOO_MUCH),
    "references": (chain(4000, {"type": "string"}, lambda to: {"allOf": [to]}), TOO_MUCH),
    "large": (lark("start: " + '"a" ' * 200_000), "at most"),
    "nothing": (schema({"$ref": "#"}), "nothing can match it"),
    "exponential": (
        lark("start: R0\n" + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(40)) + '\nR40: "a"'),
        "big",
    ),
    "id": (lark(f"start: <[{IDS + 1}]>"), "range end too large"),
}


@pytest.mark.parametrize("name", HARMFUL)
async def test_what_is_harmful_is_refused(checker: GrammarChecker, name: str) -> None:
    grammar, why = HARMFUL[name]
    check, turns = asyncio.create_task(checker.check(grammar)), 0
    while not check.done():
        before = asyncio.get_running_loop().time()
        await asyncio.sleep(0.001)
        turns += 1
        assert asyncio.get_running_loop().time() - before < 1, "others get their turn"
    assert why in check.result()
    assert len(check.result()) < 400
    assert await checker.check(lark('start: "a"')) == "", "the next one gets its answer"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"format": "colour"}, "Unknown format: colour"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "#/$defs/a"}, "$ref: Pointer '/$defs/a' does not exist"),
        ({"type": "string", "pattern": "(?=a)b"}, "the pattern is wrong: look-around"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "minimum (5) is greater than maximum (3)"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "oneOf constraints are not supported"),
        ({"x-guidance": {"lenient": False}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
)
async def test_the_keyword_is_named(checker: GrammarChecker, value: Any, why: str) -> None:
    assert why in await checker.check(schema(value))


async def test_verdicts_are_remembered_and_the_process_may_die(checker: GrammarChecker) -> None:
    good = [lark(f'start: "{number}"') for number in range(5)]
    assert await asyncio.gather(*map(checker.check, good)) == [""] * 5
    child = checker._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    assert await checker.check(good[0]) == "" and checker._child is child, "known"
    assert await checker.check(lark('start: "new"')) == "" and checker._child is not child


async def test_who_goes_away_does_not_disturb_others(checker: GrammarChecker) -> None:
    slow = schema({"properties": {f"p{number}": {"type": "string"} for number in range(2500)}})
    gone, waiting = asyncio.create_task(checker.check(slow)), asyncio.create_task(checker.check(slow))
    await asyncio.sleep(0.1)
    gone.cancel()
    assert await waiting == ""
    assert await checker.check(lark("start: foo")) == 'unknown name: "foo"'


async def test_those_that_wait_are_bounded(checker: GrammarChecker) -> None:
    checks = [asyncio.create_task(checker.check(lark(f'start: "{number}"'))) for number in range(MOST_WAITING + 1)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert results[:-1] == [""] * MOST_WAITING
    assert isinstance(results[-1], ApiError) and results[-1].status == 429
