"""Calls found in text: whole, cut anywhere, in pieces of any size."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.tool_calls import CallDelta, CallReader
from frontend.tool_formats import HERMES, LLAMA3, ToolFormat, written

NAMES = frozenset({"get", "get_weather"})
Call = tuple[str, str]
"""Its name and arguments."""


def read(form: ToolFormat, pieces: list[str], *, early: bool, cut: bool = False) -> tuple[str, list[Call], int]:
    """The text, the calls, and how many of them are complete."""
    reader = CallReader(form, NAMES, early=early)
    text, deltas = "", list[CallDelta]()
    for piece in pieces:
        more, calls = reader.feed(piece)
        text, deltas = text + more, deltas + calls
    more, calls = reader.flush(cut)
    return text + more, joined(deltas + calls), reader.complete


def joined(deltas: list[CallDelta]) -> list[Call]:
    calls: list[Call] = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.index == len(calls) and delta.id and delta.arguments == ""
            calls.append((delta.name, ""))
        assert delta.index == len(calls) - 1, "only the last call goes on"
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


PARIS = '{"city": "Paris"}'
H0 = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
H1 = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
L0 = '{"name": "get", "parameters": {"city": "Paris"}}'
L1 = '{"name": "get_weather", "parameters": {}}'
NASTY = {"a": '} ] </tool_call> {"', "b\\": ["\\", '\\"', "🦜\n"], "c": {"d": [[], {}], "e": -1.5e3}}


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, H0, "", [("get", PARIS)]),
        (HERMES, f"Let me see.\n{H0}\n{H1}\n", "Let me see.", [("get", PARIS), ("get_weather", "{}")]),
        (HERMES, f"{H0}\nDone.", "\nDone.", [("get", PARIS)]),
        (HERMES, H0.removesuffix("\n</tool_call>"), "", [("get", PARIS)]),
        (HERMES, H0.removesuffix("}\n</tool_call>"), "", [("get", PARIS)]),
        (HERMES, H0.replace("}}\n", "}\n"), "", [("get", PARIS)]),
        (HERMES, '<tool_call>{"arguments": {"a":1}, "name": "get"}</tool_call>', "", [("get", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
        (HERMES, '<tool_call>{"name": "get", "parameters": {"a":1}}</tool_call>', "", [("get", '{"a":1}')]),
        (HERMES, "a < b <tool", "a < b <tool", []),
        (HERMES, " two\n\n", " two\n\n", []),
        (LLAMA3, L0, "", [("get", PARIS)]),
        (LLAMA3, f"\n{L0}; {L1}", "", [("get", PARIS), ("get_weather", "{}")]),
        (LLAMA3, f"<|python_tag|>{L0}\n{L1}", "", [("get", PARIS), ("get_weather", "{}")]),
        (LLAMA3, f"See: <|python_tag|>{L0}", "See:", [("get", PARIS)]),
        (LLAMA3, L0.replace('"name"', '"type": "function", "name"'), "", [("get", PARIS)]),
        (LLAMA3, f"See: {L0}", f"See: {L0}", []),
        (LLAMA3, '{"answer": 5}', '{"answer": 5}', []),
        (LLAMA3, f"{L0} and more", " and more", [("get", PARIS)]),
        (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_what_is_a_call_and_what_is_text(
    form: ToolFormat, text: str, content: str, calls: list[Call], early: bool
) -> None:
    assert read(form, [text], early=early) == (content, calls, len(calls))
    assert read(form, list(text), early=early) == (content, calls, len(calls))


@pytest.mark.parametrize(
    "text",
    [
        H0.replace('"get"', '"other"'),
        H0.replace('"name"', '"nome"'),
        H0.replace('{"city": "Paris"}', '"Paris"'),
        H0.replace('{"city": "Paris"}', "[1]"),
        H0.replace("{", "[", 1),
        "<tool_call>\nget(city)\n</tool_call>",
        '<tool_call>\n{"name": get}\n</tool_call>',
        '<tool_call>\n{"name": "get", "argum',
        "<tool_call>",
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_what_is_no_call_stays_text(text: str, early: bool) -> None:
    assert read(HERMES, list(f"So: {text} yes"), early=early, cut=True) == (f"So: {text} yes", [], 0)


def test_arguments_that_break_off() -> None:
    text = """<tool_call>\n{"name": "get", "arguments": {"a": 'b'}}\n</tool_call>"""
    assert read(HERMES, [text], early=False) == (text, [], 0), "nothing was given out yet"
    assert read(HERMES, list(text), early=True) == ("""'b'}}\n</tool_call>""", [("get", '{"a": ')], 0)
    invalid = text.replace("'b'", "1 2")
    assert read(HERMES, [invalid], early=False) == (invalid, [], 0)


@pytest.mark.parametrize(("form", "text"), [(HERMES, f"{H1}\n{H0}"), (LLAMA3, f"{L1}; {L0}")])
@pytest.mark.parametrize("early", [False, True])
def test_a_cut_answer_has_the_beginning_of_its_last_call(form: ToolFormat, text: str, early: bool) -> None:
    place = text.index("Paris") + 2
    calls = [("get_weather", "{}"), ("get", '{"city": "Pa')]
    assert read(form, list(text[:place]), early=early, cut=True) == ("", calls, 1)


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES, early=True)
    seen = [
        reader.feed(piece)
        for piece in ("Hm <to", "ol_call>", '\n{"name": "get", "arguments": ', '{"ci', 'ty": 1', "}}")
    ]
    assert seen[:3] == [("Hm", []), ("", []), ("", [])]
    opened, first = seen[3][1]
    assert (opened.name, opened.arguments, first) == ("get", "", CallDelta(0, '{"ci'))
    assert [calls for _, calls in seen[4:]] == [[CallDelta(0, 'ty": 1')], [CallDelta(0, "}")]]


PIECES = st.sampled_from(
    [
        *(
            "Hello",
            " ",
            "\n",
            "{",
            "}",
            '"',
            ";",
            "; ",
            "\\",
            "🦜",
            "<",
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
        ),
        *(H0, H1, L0, L1, written(HERMES, "get", NASTY), written(LLAMA3, "get_weather", NASTY)),
        *('{"name": "get", "arguments": ', '{"name": "other", "arguments": {}}', "\n</tool_", "'", "</thi"),
    ]
)


@given(
    parts=st.lists(PIECES, max_size=6),
    form=st.sampled_from([HERMES, LLAMA3]),
    early=st.booleans(),
    cut=st.booleans(),
    data=st.data(),
)
def test_how_text_is_cut_into_pieces_changes_nothing(
    parts: list[str], form: ToolFormat, early: bool, cut: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    whole = read(form, [text], early=early, cut=cut)
    assert read(form, pieces, early=early, cut=cut) == whole
    assert read(form, list(text), early=early, cut=cut) == whole
    content, calls, complete = whole
    assert complete <= len(calls) <= complete + (early or cut) * len(calls)
    if not early and not cut:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    if not calls:
        assert content == text, "nothing is lost"


@given(
    calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.just(NASTY) | st.dictionaries(st.text(), st.text()))),
    form=st.sampled_from([HERMES, LLAMA3]),
    early=st.booleans(),
)
def test_any_calls_are_read_as_they_were_written(
    calls: list[tuple[str, dict[str, object]]], form: ToolFormat, early: bool
) -> None:
    text = form.between.join(written(form, name, arguments) for name, arguments in calls)
    content, found, complete = read(form, list(text), early=early)
    assert (content, complete) == ("", len(calls))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
