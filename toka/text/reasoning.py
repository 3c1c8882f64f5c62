"""What a model thinks before it answers, told apart from the answer in text that arrives in pieces."""

from __future__ import annotations

import enum

OPEN, CLOSE = "<think>", "</think>"


class _State(enum.Enum):
    BEFORE = enum.auto()
    OPENED = enum.auto()
    INSIDE = enum.auto()
    CLOSED = enum.auto()
    AFTER = enum.auto()


class ThinkSplitter:
    """Splits a text that may begin with a `<think>` block.

    Gives out neither the tags nor the line breaks beside them, and holds back only what may still become either.
    A block that never ends is reasoning to its end. `inside`: the block was opened before the text.
    """

    __slots__ = ("_held", "_state")

    def __init__(self, inside: bool) -> None:
        self._state = _State.OPENED if inside else _State.BEFORE
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are known with `text`."""
        self._held += text
        reasoning = ""
        if self._state is _State.BEFORE:
            self._look_for_block()
        if self._state is _State.OPENED:
            self._skip_breaks(_State.INSIDE)
        if self._state is _State.INSIDE:
            reasoning = self._reasoning()
        if self._state is _State.CLOSED:
            self._skip_breaks(_State.AFTER)
        return reasoning, self.flush()[1] if self._state is _State.AFTER else ""

    def flush(self) -> tuple[str, str]:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return (held, "") if self._state is _State.INSIDE else ("", held)

    def _look_for_block(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._state, self._held = _State.OPENED, text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._state = _State.AFTER

    def _skip_breaks(self, then: _State) -> None:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = then

    def _reasoning(self) -> str:
        text, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._state, self._held = _State.CLOSED, rest
            return text.rstrip("\n")
        begun = next(size for size in range(len(CLOSE) - 1, -1, -1) if text.endswith(CLOSE[:size]))
        sure = text[: len(text) - begun].rstrip("\n")
        self._held = text[len(sure) :]
        return sure


def thinks(template: str) -> bool:
    """Whether a chat template is one of a model that thinks in such blocks."""
    return CLOSE in template


def begins_inside(prompt: str, begun: str) -> bool:
    """Whether the text behind a rendered prompt is within a block: `begun` is what the client began of the answer."""
    return prompt.rstrip().endswith(OPEN) or begun.rfind(OPEN) > begun.rfind(CLOSE)


def may_think(prompt: str, begun: str) -> bool:
    """Whether the text behind a rendered prompt that is not within a block may begin with one."""
    return not begun.strip() and not prompt.rstrip().endswith(CLOSE)
