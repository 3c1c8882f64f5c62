"""What an answer has to match, as the engine takes it: grammars of llguidance in JSON.

A grammar is Lark with a rule `answer`, and parts of other kinds that its rules name (`@body`). An answer that may
begin with thoughts has them before what `answer` matches.
"""

from __future__ import annotations

import asyncio
import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frontend.errors import wrong
from frontend.formats import exact
from frontend.grammar_check import GrammarChecker
from frontend.schema import ResponseFormat, Sampling
from toka.text.reasoning import CLOSE, OPEN
from toka.text.vocabulary import Vocabulary

COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in JSON is either fixed or sampled without end; this is as models are trained to write arguments."""
OBJECT: Mapping[str, Any] = {"type": "object"}
ANY_TEXT = "(?s:.*)"
_BREAKS = r"BREAKS: /\n{0,2}/"
"""What models write behind a think block; it is no part of the answer."""
_WHOLE = re.compile(r"(?s)([^\\]|\\.)*")
_MEANT_BY_LARK = re.compile(r"(?s)\\.|/|\n")
_LARK_ESCAPES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


class Thoughts(enum.Enum):
    """What may come before the answer."""

    NONE = enum.auto()
    OPTIONAL = enum.auto()
    """A whole block."""
    REST = enum.auto()
    """The rest of a block that the prompt has begun."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a field of the request asks for."""

    field: str
    lark: str = ""
    schema: Mapping[str, Any] | None = None
    """Of JSON, where there is no `lark` ..."""
    spaced: bool = False
    """... that is written SPACED, not COMPACT."""

    def text(self, name: str) -> str:
        """Takes its time with a large schema. Raises ApiError where one is nested too deeply."""
        if self.schema is None:
            return json.dumps({"name": name, "lark_grammar": self.lark})
        try:
            style = SPACED if self.spaced else COMPACT
            schema = {**exact(self.schema), "x-guidance": {**style, "lenient": False}}
            return json.dumps({"name": name, "json_schema": schema}, separators=(",", ":"))
        except RecursionError:
            raise wrong(self.field, "nested too deeply") from None


@dataclass(frozen=True, slots=True)
class Grammar:
    lark: str
    """Rules; the answer matches the one that is called `answer`."""
    parts: Mapping[str, Part]
    """By the names that `lark` has for them."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Of SamplingParams: `grammar` and `grammar_after`."""

    grammar: str
    after: int


class Grammars:
    """Makes Constraints for one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._checker = GrammarChecker(vocabulary.size)
        self._vocabulary = vocabulary

    async def constraint(self, grammar: Grammar, thoughts: Thoughts = Thoughts.NONE) -> Constraint:
        """Raises ApiError that names the field which cannot be honoured."""
        close = self._vocabulary.token(CLOSE)
        after = close if close is not None and thoughts is Thoughts.REST else -1
        text = await asyncio.to_thread(_text, f"{self._start(thoughts, after)}\n{grammar.lark}", grammar.parts)
        if reason := await self._checker.check(text):
            await self._blame(grammar.parts, reason)
        return Constraint(text, after)

    async def close(self) -> None:
        await self._checker.close()

    async def _blame(self, parts: Mapping[str, Part], reason: str) -> None:
        """Raise ApiError for the part that is wrong, or for all of them together."""
        for name, part in parts.items():
            if len(parts) == 1:
                raise wrong(part.field, reason)
            if own := await self._checker.check(await asyncio.to_thread(_text, f"start: @{name}", {name: part})):
                raise wrong(part.field, own)
        fields = sorted({part.field.partition("[")[0] for part in parts.values()})
        raise wrong(fields[-1], f"together with all of {' and '.join(fields)}: {reason}")

    def _start(self, thoughts: Thoughts, after: int) -> str:
        if thoughts is Thoughts.NONE:
            return "start: answer"
        if after >= 0:
            return f"start: BREAKS answer\n{_BREAKS}"
        close = marked(CLOSE, self._vocabulary)
        thought = f"thought: {close.rule}\n{close.definitions}\n{_BREAKS}"
        if thoughts is Thoughts.REST:
            return f"start: thought BREAKS answer\n{thought}"
        return f"start: (opened thought)? BREAKS answer\nopened: {literal(OPEN, self._vocabulary)}\n{thought}"


@dataclass(frozen=True, slots=True)
class Marked:
    """Any text up to a mark, and the mark: an alternative for rules, and what it refers to."""

    rule: str
    definitions: str


def marked(mark: str, vocabulary: Vocabulary, text: str = ANY_TEXT) -> Marked:
    """The shortest text that matches the regular expression `text`, and `mark` behind it.

    A mark that is a token may still be spelled by others, and is then found all the same.
    """
    name = re.sub(r"\W", "", mark)
    spelled = f"{name}_spelled[lazy]: /{text}{_escaped(mark)}/"
    if vocabulary.token(mark) is None:
        return Marked(f"{name}_spelled", spelled)
    before = f"BEFORE_{name.upper()}"
    rule = f"{before} {literal(mark, vocabulary)} | {name}_spelled"
    return Marked(f"({rule})", f"{before}: /{text}/\n{spelled}")


def literal(text: str, vocabulary: Vocabulary) -> str:
    """`text` in a rule: as the token that it is, or spelled."""
    token = vocabulary.token(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def wanted(request: Sampling) -> Part | None:
    """What the request wants its answer to be like. Raises ApiError where that is more than one thing."""
    asked = _format(request.response_format)
    if request.regex is not None:
        asked.append(Part("regex", lark=f"start: /{_between_slashes(request.regex)}/"))
    if request.grammar is not None:
        asked.append(Part("grammar", lark=request.grammar))
    if len(asked) > 1:
        raise wrong(asked[1].field, f"excludes {asked[0].field}")
    return asked[0] if asked else None


def check_ends(request: Sampling) -> None:
    """Raises ApiError for fields that keep a grammar from ending the answer."""
    why = "excludes an answer with a grammar, whose end is an end-of-sequence token"
    if request.ignore_eos:
        raise wrong("ignore_eos", why)
    if request.min_tokens:
        raise wrong("min_tokens", why)


def _format(asked: ResponseFormat | None) -> list[Part]:
    if asked is None or asked.type != "json_schema":
        if asked is not None and asked.json_schema is not None:
            raise wrong("response_format.json_schema", 'needs the type "json_schema"')
        json_object = asked is not None and asked.type == "json_object"
        return [Part("response_format", schema=OBJECT)] if json_object else []
    if asked.json_schema is None:
        raise wrong("response_format.json_schema", "missing")
    if asked.json_schema.schema is None:
        raise wrong("response_format.json_schema.schema", "missing")
    return [Part("response_format", schema=asked.json_schema.schema)]


def _between_slashes(regex: str) -> str:
    if not _WHOLE.fullmatch(regex):
        raise wrong("regex", "ends within an escape")
    return _MEANT_BY_LARK.sub(lambda found: _LARK_ESCAPES.get(found[0], found[0]), regex)


def _text(lark: str, parts: Mapping[str, Part]) -> str:
    grammars = [json.dumps({"lark_grammar": lark}), *(part.text(name) for name, part in parts.items())]
    return f'{{"grammars":[{",".join(grammars)}]}}'


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
