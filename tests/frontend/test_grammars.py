"""Grammars as the engine gets them, by what they let through on the demo model's own tokens."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import pytest_asyncio

from frontend import tool_formats
from frontend.errors import ApiError
from frontend.grammars import Grammar, Grammars, Part, Thoughts
from frontend.schema import ChatRequest, CompletionRequest
from frontend.structure import text_grammar
from frontend.tool_calls import CallReader
from frontend.tool_formats import HERMES, LLAMA3, ToolFormat, written
from frontend.tools import toolbox
from tests.support.schemas import schema
from tests.support.walk import accepted, marked_tokenizer, walk
from toka.text.vocabulary import Vocabulary

SCHEMAS = 200
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["city", "next"],
    "additionalProperties": False,
}
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
ANSWER: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}


@pytest_asyncio.fixture
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars(vocabulary())
    yield grammars
    await grammars.close()


def vocabulary() -> Vocabulary:
    return Vocabulary(marked_tokenizer())


def chat(**fields: Any) -> ChatRequest:
    tools = [
        {"type": "function", "function": {"name": "get", "parameters": CITY, "strict": True}},
        {"type": "function", "function": {"name": "get_unit", "parameters": UNIT}},
    ]
    return msgspec.convert({"messages": [{"role": "user", "content": "Hi."}], "tools": tools, **fields}, ChatRequest)


def finite(number: str) -> float:
    """JSON has numbers that floats have not."""
    return max(-1e300, min(1e300, float(number)))


def body(schema: dict[str, Any]) -> Grammar:
    return Grammar("answer: @body", {"body": Part("response_format", schema=schema)})


async def test_what_ends_validates_whatever_is_drawn(grammars: Grammars) -> None:
    ended = 0
    for seed in range(SCHEMAS):
        chance = random.Random(seed)
        wanted = schema(chance)
        constraint = await grammars.constraint(body(wanted))
        text = walk(constraint.grammar, chance)
        if text is None:
            continue
        ended += 1
        value = json.loads(text, parse_float=finite)
        jsonschema_rs.validator_for(wanted, validate_formats=True).validate(value)
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)), "no white space outside strings"
    assert ended > SCHEMAS * 0.9


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}, "auto"])
async def test_calls_that_are_held_are_read_back_and_validate(
    grammars: Grammars, form: ToolFormat, choice: Any
) -> None:
    box = toolbox(chat(tool_choice=choice))
    assert box is not None
    constraint = await grammars.constraint(tool_formats.grammar(form, box, vocabulary(), None))
    chance, called = random.Random(1), 0
    for _ in range(15):
        text = walk(constraint.grammar, chance, marked=True)
        if text is None:
            continue
        reader = CallReader(form, box.names, early=True)
        content, deltas = reader.feed(text)
        rest, last = reader.flush(False)
        names = [each.name for each in deltas if each.name]
        assert not last and len(names) == reader.complete, text
        assert choice == "auto" or (content + rest == "" and names), text
        for index, name in enumerate(names):
            called += 1
            arguments = json.loads("".join(each.arguments for each in deltas if each.index == index))
            if name == "get" or choice == "required":
                jsonschema_rs.validate(CITY if name == "get" else UNIT, arguments)
    assert called > 5 or choice == "auto"


def calls(form: ToolFormat) -> tuple[str, str]:
    paris = {"city": "Paris", "next": {"city": "Köln", "next": None}}
    return written(form, "get", paris), written(form, "get_unit", {"unit": "F"})


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize("thoughts", Thoughts)
async def test_what_a_model_with_tools_may_write(grammars: Grammars, form: ToolFormat, thoughts: Thoughts) -> None:
    begins = {Thoughts.NONE: "", Thoughts.OPTIONAL: "<think>\nso {\n</think>\n\n", Thoughts.REST: "\n\n"}[thoughts]
    city, unit = calls(form)
    wrong_city = city.replace('"city"', '"town"')
    marked = "Well. " + ("" if not form.bare else form.mark) + city
    cases: list[tuple[dict[str, Any], dict[str, bool]]] = [
        ({}, {"": True, "Hi {<tool": True, city: True, city + form.between + unit: True, marked: True}),
        ({}, {wrong_city: False, unit.replace("F", "K"): True, form.mark + "Hi": False, city + "Hi": False}),
        ({"tool_choice": "required"}, {"": False, "Hi": False, unit.replace("F", "K"): False, unit: True}),
        ({"parallel_tool_calls": False}, {"Hi": True, unit: True, city + form.between + unit: False}),
        ({"tool_choice": {"type": "function", "function": {"name": "get"}}}, {city: True, unit: False}),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "get"}}]}}}, {city: True, unit: False, "Hi": True}),
    ]  # fmt: skip
    for fields, texts in cases:
        box = toolbox(chat(**fields))
        assert box is not None
        constraint = await grammars.constraint(tool_formats.grammar(form, box, vocabulary(), None), thoughts)
        assert {text: accepted(constraint.grammar, begins + text) for text in texts} == texts
        assert constraint.after == (marked_tokenizer().token_to_id("</think>") if thoughts is Thoughts.REST else -1)


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
async def test_tools_or_an_answer_of_a_form(grammars: Grammars, form: ToolFormat) -> None:
    box = toolbox(chat())
    assert box is not None
    answer = Part("response_format", schema=ANSWER)
    constraint = await grammars.constraint(tool_formats.grammar(form, box, vocabulary(), answer))
    city, unit = calls(form)
    texts = {'{"name":"get"}': True, "{}": True, city: True, unit + form.between + city: True, "Hi": False, "": False}
    assert {text: accepted(constraint.grammar, text) for text in texts} == texts


async def test_thoughts_and_then_the_answer(grammars: Grammars) -> None:
    for thoughts, before in itertools.product(Thoughts, ("", "<think>a{\n</think>\n\n", "a\n</think>\n")):
        constraint = await grammars.constraint(body(ANSWER), thoughts)
        fits = {Thoughts.NONE: before == "", Thoughts.OPTIONAL: before[:1] != "a", Thoughts.REST: before == ""}
        assert accepted(constraint.grammar, before + '{"name":"x"}') == fits[thoughts]


async def test_models_whose_marks_are_no_tokens(grammars: Grammars) -> None:
    from tests.support.demo import demo_tokenizer

    plain = Grammars(Vocabulary(demo_tokenizer()))
    constraint = await plain.constraint(body(ANSWER), Thoughts.REST)
    await plain.close()
    assert constraint.after == -1 and '"thought' not in constraint.grammar and "thought[" not in constraint.grammar
    assert "think_spelled" in constraint.grammar


@pytest.mark.parametrize(
    ("fields", "fits", "fails"),
    [
        ({"regex": r"(a/b|\d{2})\n?"}, ["a/b", "12\n"], ["a\\/b", "1", ""]),
        ({"regex": "a\nb|\\/"}, ["a\nb", "/"], ["ab"]),
        ({"grammar": 'start: "yes" | "no" " way"?'}, ["yes", "no way"], ["maybe"]),
        ({"response_format": {"type": "json_object"}}, ['{"a":[1,{"b":null}]}', "{}"], ["[]", '{"a": 1}', " {}"]),
    ],
)
async def test_other_forms_of_text(grammars: Grammars, fields: Any, fits: list[str], fails: list[str]) -> None:
    grammar = text_grammar(msgspec.convert({"prompt": "Hi."} | fields, CompletionRequest))
    assert grammar is not None
    constraint = await grammars.constraint(grammar)
    assert all(accepted(constraint.grammar, text) for text in fits)
    assert not any(accepted(constraint.grammar, text) for text in fails)


async def test_a_second_is_the_last_of_a_minute_or_none(grammars: Grammars) -> None:
    strings = {"moment": {"format": "date-time"}, "format": {"const": {"format": "time"}}}
    times = {"type": "array", "items": {"$ref": "#/$defs/time"}}
    wanted = {"type": "object", "properties": {**strings, "times": times}, "$defs": {"time": {"format": "time"}}}
    grammar = (await grammars.constraint(body(wanted))).grammar
    assert accepted(grammar, '{"moment":"2024-02-29T12:30:59Z","format":{"format":"time"},"times":["10:00:00Z"]}')
    for text in ('{"moment":"2024-02-29T12:30:60Z"}', '{"times":["10:00:60Z"]}', '{"moment":"2023-02-29T12:30:59Z"}'):
        assert not accepted(grammar, text)
    email = (await grammars.constraint(body({"type": "string", "format": "email"}))).grammar
    assert accepted(email, '"a.b@c.example"') and not accepted(email, f'"{"a" * 65}@c.example"')


async def test_the_tool_that_is_wrong_is_named(grammars: Grammars) -> None:
    good = {"type": "function", "function": {"name": "good", "parameters": CITY, "strict": True}}
    bad = {"name": "bad", "strict": True, "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    box = toolbox(chat(tools=[good, {"type": "function", "function": bad}]))
    assert box is not None
    with pytest.raises(ApiError, match="uniqueItems") as caught:
        await grammars.constraint(tool_formats.grammar(HERMES, box, vocabulary(), None))
    assert caught.value.param == "tools[1].function.parameters"
