"""Calls of tools in an answer's text, found while it arrives in pieces."""

from __future__ import annotations

import enum
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from frontend.json_end import JsonEnd
from frontend.tool_formats import NAME, ToolFormat
from toka.text.stops import overlap

_HEAD = re.compile(
    rf'\{{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"{NAME}"\s*:\s*"([a-zA-Z0-9_-]{{1,64}})"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments. Models take one word for the other, and some say the type first."""


@dataclass(slots=True)
class CallDelta:
    """More of the call with this index. Its first one has the id and the name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class _State(enum.Enum):
    TEXT = enum.auto()
    CALL = enum.auto()
    """Behind a mark: what is held may still turn out to be no call."""
    ARGUMENTS = enum.auto()
    """Within those of a call that was given out."""
    REST = enum.auto()
    """Behind them, within the call's object."""
    BEHIND = enum.auto()
    """Behind the object."""


class CallReader:
    """Tells the calls in an answer from its text.

    What is no call of one of the tools is text, and no character of it is lost, save white space beside calls. Only
    what may still become a mark or a call is held back. `early`: a call is given out as soon as its name is known,
    and its arguments as they come: what follows can no longer make it text. `at_start`: no text of the answer stands
    before this one.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str], *, early: bool, at_start: bool = True) -> None:
        self.complete = 0
        """Calls that have ended."""
        self._form, self._names, self._early = form, names, early
        self._state, self._bare = _State.TEXT, form.bare and at_start
        self._held = ""
        self._from = 0
        """Where, in `_held`, the object of a call is to begin."""
        self._object, self._arguments = JsonEnd(), JsonEnd()
        """Of a call, and within it."""
        self._scanned = 0
        """Characters of `_held` that `_object` has seen."""
        self._count = 0

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        """The text and the calls that are known with `text`."""
        self._held += text
        texts: list[str] = []
        deltas: list[CallDelta] = []
        while self._advance(texts, deltas):
            pass
        return "".join(texts), deltas

    def flush(self, cut: bool) -> tuple[str, list[CallDelta]]:
        """What was held back, once no text follows. `cut`: the answer would have gone on."""
        held, self._held = self._held, ""
        if self._state in (_State.REST, _State.BEHIND) or (self._count and not held.strip()):
            return "", []
        if self._state is not _State.CALL:
            return held, []
        call = _read(held[self._from :], cut)
        if call is None or call.name not in self._names:
            return held, []
        return "", self._whole(call)

    def _advance(self, texts: list[str], deltas: list[CallDelta]) -> bool:
        """Handle what is held, up to a change of state: whether there was one."""
        match self._state:
            case _State.TEXT:
                return self._read_text(texts)
            case _State.CALL:
                return self._read_call(texts, deltas)
            case _State.ARGUMENTS:
                return self._read_arguments(deltas)
            case _State.REST:
                return self._read_rest()
            case _State.BEHIND:
                return self._read_behind()

    def _read_text(self, texts: list[str]) -> bool:
        held, mark = self._held, self._form.mark
        if self._bare:
            begun = held.lstrip()
            if not begun:
                return False
            if begun.startswith("{"):
                return self._enter_call(len(held) - len(begun))
        place = held.find(mark)
        sure = len(held[: place if place >= 0 else overlap(held, mark)].rstrip())
        if sure:
            self._bare = False
            texts.append(held[:sure])
            self._held = held[sure:]
        return self._enter_call(place - sure + len(mark)) if place >= 0 else False

    def _enter_call(self, place: int) -> bool:
        self._state, self._from, self._scanned, self._object = _State.CALL, place, place, JsonEnd()
        return True

    def _read_call(self, texts: list[str], deltas: list[CallDelta]) -> bool:
        held = self._held
        if self._scanned == self._from:
            self._from = self._scanned = len(held) - len(held[self._from :].lstrip())
            if self._from == len(held):
                return False
            if held[self._from] != "{":
                return self._release(texts, self._from)
        head = _HEAD.match(held, self._from) if self._early else None
        if head and head[1] in self._names:
            deltas.append(self._opened(head[1]))
            self._object.feed(held[self._scanned : head.end()])
            self._state, self._held, self._arguments = _State.ARGUMENTS, held[head.end() :], JsonEnd()
            return True
        end = self._object.feed(held[self._scanned :])
        if end < 0:
            self._scanned = len(held)
            return False
        end += self._scanned
        call = _read(held[self._from : end], False)
        if call is None or call.name not in self._names:
            return self._release(texts, end)
        deltas += self._whole(call)
        return self._close(end)

    def _read_arguments(self, deltas: list[CallDelta]) -> bool:
        end = self._arguments.feed(self._held)
        arguments = self._held if end < 0 else self._held[:end]
        if arguments:
            deltas.append(CallDelta(self._count - 1, arguments))
            self._object.feed(arguments)
        self._held = self._held[len(arguments) :]
        if end < 0:
            return False
        if self._arguments.broken:
            self._state, self._bare = _State.TEXT, False
        else:
            self.complete += 1
            self._state = _State.REST
        return True

    def _read_rest(self) -> bool:
        end = self._object.feed(self._held)
        if end < 0:
            self._held = ""
            return False
        return self._close(end)

    def _read_behind(self) -> bool:
        """Skip the end mark, if it is there, and what separates calls that need no mark."""
        rest, mark = self._held.lstrip(), self._form.end_mark
        if mark and rest.startswith(mark):
            self._held = rest[len(mark) :]
        elif mark.startswith(rest):
            return False
        elif self._form.bare:
            rest = rest.removeprefix(";").lstrip()
            if not rest:
                return False
            self._held = rest if rest.startswith("{") else self._held
        self._state, self._bare = _State.TEXT, self._form.bare
        return True

    def _opened(self, name: str) -> CallDelta:
        self._count += 1
        return CallDelta(self._count - 1, id=f"call_{secrets.token_hex(12)}", name=name)

    def _whole(self, call: _Call) -> list[CallDelta]:
        self.complete += call.complete
        return [self._opened(call.name), CallDelta(self._count - 1, call.arguments)]

    def _close(self, end: int) -> bool:
        self._state, self._held = _State.BEHIND, self._held[end:]
        return True

    def _release(self, texts: list[str], end: int) -> bool:
        """What is held up to `end` is text."""
        texts.append(self._held[:end])
        self._state, self._held, self._bare = _State.TEXT, self._held[end:], False
        return True


class _Call(NamedTuple):
    name: str
    arguments: str
    complete: bool


def _read(text: str, cut: bool) -> _Call | None:
    """The call that `text` is; None where it is none. `cut`: its arguments may lack their end."""
    if head := _HEAD.match(text):
        end = JsonEnd()
        size = end.feed(text[head.end() :])
        arguments = text[head.end() :] if size < 0 else text[head.end() : head.end() + size]
        if size < 0 or end.broken:
            return _Call(head[1], arguments, False) if cut and size < 0 else None
        return _Call(head[1], arguments, True) if _object(arguments) is not None else None
    fields = _object(text) or {}
    name, given = fields.get(NAME), fields.get("arguments", fields.get("parameters")) or {}
    if not isinstance(name, str) or not isinstance(given, dict):
        return None
    return _Call(name, json.dumps(given, ensure_ascii=False), True)


def _object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
