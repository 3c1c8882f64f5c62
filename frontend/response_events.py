"""The items of a response's output, while they are written: the events that tell of them, and what they become."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from frontend.sample import Piece
from frontend.tool_calls import CallDelta

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]
"""Of tokens, as OpenAI has them."""


class Item:
    """One item, from `begin` to `end`, and the events of each change. Subclasses are the kinds there are."""

    prefix: str

    def __init__(self, index: int) -> None:
        """`index`: its place in the output."""
        self.id = f"{self.prefix}_{secrets.token_hex(12)}"
        self._index = index
        self._written: list[str] = []

    def begin(self) -> list[Event]:
        item = self.value("in_progress")
        return [{"type": "response.output_item.added", "output_index": self._index, "item": item}]

    def end(self, status: str) -> list[Event]:
        item = self.value(status)
        return [{"type": "response.output_item.done", "output_index": self._index, "item": item}]

    def value(self, status: str) -> dict[str, Any]:
        """The item as it stands."""
        raise NotImplementedError

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self._index} | fields


class TextItem(Item):
    """An item with one part, which is text."""

    kind: str
    part: str
    beside: Mapping[str, Any]
    """What the item has besides."""

    def begin(self) -> list[Event]:
        return [*super().begin(), self._event("content_part.added", content_index=0, part=self._part())]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._written.append(text)
        return [self._event(f"{self.part}.delta", content_index=0, delta=text)]

    def end(self, status: str) -> list[Event]:
        part = self._part()
        done = self._event(f"{self.part}.done", content_index=0, text=part["text"])
        return [done, self._event("content_part.done", content_index=0, part=part), *super().end(status)]

    def value(self, status: str) -> dict[str, Any]:
        content = [self._part()] if self._written else []
        return {"id": self.id, "type": self.kind, "status": status, "content": content, **self.beside}

    def _part(self) -> dict[str, Any]:
        return {"type": self.part, "text": "".join(self._written)}


class Reasoning(TextItem):
    prefix, kind, part = "rs", "reasoning", "reasoning_text"
    beside: Mapping[str, Any] = {"summary": []}


class OutputMessage(TextItem):
    prefix, kind, part = "msg", "message", "output_text"
    beside: Mapping[str, Any] = {"role": "assistant"}

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: Logprobs = []

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._logprobs += logprobs
        (delta,) = super().add(text, logprobs)
        return [delta | {"logprobs": logprobs}]

    def end(self, status: str) -> list[Event]:
        done, *others = super().end(status)
        return [done | {"logprobs": self._logprobs}, *others]

    def _part(self) -> dict[str, Any]:
        return super()._part() | {"annotations": [], "logprobs": list(self._logprobs)}


class FunctionCall(Item):
    prefix = "fc"

    def __init__(self, index: int, call: CallDelta) -> None:
        super().__init__(index)
        self._call_id, self._name = call.id, call.name

    def add(self, arguments: str) -> list[Event]:
        if not arguments:
            return []
        self._written.append(arguments)
        return [self._event("function_call_arguments.delta", delta=arguments)]

    def end(self, status: str) -> list[Event]:
        arguments = "".join(self._written)
        done = self._event("function_call_arguments.done", name=self._name, arguments=arguments)
        return [done, *super().end(status)]

    def value(self, status: str) -> dict[str, Any]:
        called = {"call_id": self._call_id, "name": self._name, "arguments": "".join(self._written)}
        return {"id": self.id, "type": "function_call", "status": status} | called


class Output:
    """The items of one answer, in the order in which they are written: one is open at a time."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """Those that have ended."""
        self.called = False
        """Whether a call has begun."""
        self._open: Item | None = None
        self._events: list[Event] = []
        """Those that were not given out yet."""

    def add(self, piece: Piece, logprobs: Logprobs) -> list[Event]:
        """The events of what is new; `logprobs`: those of its text."""
        if piece.reasoning:
            self._write(Reasoning, piece.reasoning, [])
        # More of a call that had begun stood before the text, and calls that begin behind it.
        more = sum(1 for _ in takewhile(lambda each: each.name is None, piece.calls))
        self._call(piece.calls[:more])
        if piece.text:
            self._write(OutputMessage, piece.text, logprobs)
        self._call(piece.calls[more:])
        return self._take()

    def end(self, status: str, logprobs: Logprobs) -> list[Event]:
        """Nothing follows: the last item has this status, and an answer without any is an empty message.

        logprobs: those left of the text.
        """
        if self._open is None or (logprobs and isinstance(self._open, OutputMessage)):
            self._write(OutputMessage, "", logprobs)
        self._close(status)
        return self._take()

    def _write(self, kind: type[TextItem], text: str, logprobs: Logprobs) -> None:
        item = self._open
        if not isinstance(item, kind):
            self._close("completed")
            item = kind(len(self.items))
            self._begin(item)
        self._events += item.add(text, logprobs)

    def _call(self, deltas: Sequence[CallDelta]) -> None:
        for delta in deltas:
            if delta.name is not None:
                self.called = True
                self._close("completed")
                self._begin(FunctionCall(len(self.items), delta))
            assert isinstance(self._open, FunctionCall)
            self._events += self._open.add(delta.arguments)

    def _begin(self, item: Item) -> None:
        self._open = item
        self._events += item.begin()

    def _close(self, status: str) -> None:
        if self._open is not None:
            self._events += self._open.end(status)
            self.items.append(self._open.value(status))
            self._open = None

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events
