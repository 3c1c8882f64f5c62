"""One sample of a request: its ids as they arrive, and their text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frontend.tool_calls import CallDelta, CallReader
from toka.messages import Finish
from toka.text.detokenize import Detokenizer
from toka.text.reasoning import ThinkSplitter
from toka.text.stops import StopFinder


class TokenLogprob(NamedTuple):
    """A sampled token's log-probability and those of the most likely ones, (id, value) each."""

    token: int
    value: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Piece:
    """What is new of a sample's answer."""

    text: str
    logprobs: list[TokenLogprob]
    offsets: list[int]
    """Where the text of each of `logprobs` begins, in characters of the sample's text."""
    ids: list[int]
    """Where they are asked for: those of `logprobs`, where there are these as well."""
    reasoning: str
    """What the model thought before `text`."""
    calls: list[CallDelta]

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.ids or self.reasoning or self.calls)


class Sample:
    """Turns the ids of one sample into text, cut before the first stop string.

    Ids become text when `read` is called: at once where a stop string could end the sample (`eager`),
    else when somebody takes the text, many at a time for a slow reader.

    `with_ids`: pieces have all ids that usage counts and the log-probabilities of each, also of those that
    completed a stop string or ended the sample. Without it they have the log-probabilities of what made text.
    """

    __slots__ = (
        "_calls",
        "_closed",
        "_given",
        "_logprobs",
        "_made",
        "_offsets",
        "_pieces",
        "_seen",
        "_stops",
        "_text",
        "_think",
        "_told",
        "_with_ids",
        "_with_logprobs",
        "changed",
        "count",
        "finish",
        "ids",
        "index",
        "number",
    )

    def __init__(
        self,
        number: int,
        index: int,
        text: Detokenizer,
        stops: Sequence[str],
        with_logprobs: bool,
        *,
        with_ids: bool = False,
        think: ThinkSplitter | None = None,
        calls: CallReader | None = None,
    ) -> None:
        self.number = number
        """Among the samples of its prompt ..."""
        self.index = index
        """... and among the choices of the whole call."""
        self.ids: list[int] = []
        self.finish = Finish.NONE
        self.count = 0
        """Once it is finished, the tokens that usage counts: none past the one that completed a stop string."""
        self.changed = False
        """Whether it is on its call's list of what changed."""
        self._text = text
        self._stops = StopFinder(stops) if stops else None
        self._think, self._calls = think, calls
        self._with_logprobs, self._with_ids = with_logprobs, with_ids
        self._logprobs: list[TokenLogprob] = []
        self._offsets: list[int] = []
        self._pieces: list[str] = []
        self._made = 0
        """Ids that were made text."""
        self._seen = 0
        """Characters that they completed, stop string included."""
        self._told = 0
        """Characters that `take` gave out ..."""
        self._given = 0
        """... and ids."""
        self._closed = False

    @property
    def eager(self) -> bool:
        return self._stops is not None

    @property
    def called(self) -> bool:
        """Whether there are whole calls of tools in what was taken."""
        return self._calls is not None and self._calls.complete > 0

    def add(self, ids: Sequence[int], finish: Finish, logprobs: Sequence[TokenLogprob]) -> None:
        """The next ids. The last one carries no text where `finish` is STOP."""
        assert not self.finish, "nothing follows the end"
        self.ids += ids
        self._logprobs += logprobs
        if finish:
            self.finish, self.count = finish, len(self.ids)
        if self.eager:
            self.read()

    def read(self) -> None:
        """Make text of the ids that have none yet; a stop string in it ends the sample."""
        end = len(self.ids) - (self.finish == Finish.STOP)
        if self._stops is None and not self._with_logprobs:
            self._make(end)
        while self._made < end and not self._stopped:
            if self._with_logprobs:
                self._offsets.append(self._seen)
            self._make(self._made + 1)
        if self._stopped and not self._closed:
            self._closed = True
            self.finish, self.count = Finish.STOP, self._made
        elif self.finish and not self._closed:
            self._close()

    def take(self) -> Piece:
        """What is new since the last call."""
        self.read()
        text = "".join(self._pieces)
        self._pieces.clear()
        self._told += len(text)
        ids: list[int] = []
        if self._with_ids:
            ids = self.ids[self._given : self.count if self.finish else self._made]
            self._given += len(ids)
            ready = len(ids)
        elif self.finish and not self._stopped:
            ready = len(self._offsets)
        else:
            ready = bisect_left(self._offsets, self._told)
        reasoning, text = self._split(text) if self._think else ("", text)
        text, calls = self._find_calls(text) if self._calls else (text, [])
        piece = Piece(text, self._logprobs[:ready], self._offsets[:ready], ids, reasoning, calls)
        del self._logprobs[:ready], self._offsets[:ready]
        return piece

    def _split(self, text: str) -> tuple[str, str]:
        assert self._think is not None
        reasoning, answer = self._think.feed(text)
        rest = self._think.flush() if self.finish else ("", "")
        return reasoning + rest[0], answer + rest[1]

    def _find_calls(self, text: str) -> tuple[str, list[CallDelta]]:
        assert self._calls is not None
        text, calls = self._calls.feed(text)
        if not self.finish:
            return text, calls
        rest, last = self._calls.flush(cut=self.finish != Finish.STOP)
        return text + rest, calls + last

    @property
    def _stopped(self) -> bool:
        return self._stops is not None and self._stops.found

    def _make(self, end: int) -> None:
        """Make text of the ids up to number `end`."""
        if self._made < end:
            self._append(self._text.feed(self.ids[self._made : end]))
            self._made = end

    def _append(self, text: str) -> None:
        if text:
            self._seen += len(text)
            self._pieces.append(self._stops.feed(text) if self._stops else text)

    def _close(self) -> None:
        """No id follows: give out what was held back."""
        self._closed = True
        self._append(self._text.flush())
        if self._with_ids and self._with_logprobs and self.finish == Finish.STOP:
            self._offsets.append(self._seen)
        if self._stops and not self._stops.found:
            self._pieces.append(self._stops.flush())
