"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Finds where a text first completes one of several strings, wherever the text is cut into pieces.

    Gives out the text before that place and holds back only what may still become a stop string. Of
    strings that are complete at the same character, the longest counts.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty string stops everything"
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that is known to stand before any stop string; nothing once one was found."""
        if self.found or not text:
            return ""
        text = self._held + text
        start = self._first(text)
        if start is not None:
            self.found, self._held = True, ""
            return text[:start]
        sure = self._undecided(text)
        self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> int | None:
        """Where the stop string begins that is complete first."""
        places = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(places)[1] if places else None

    def _undecided(self, text: str) -> int:
        """Where the longest end of `text` begins that some stop string begins with."""
        return min(overlap(text, stop) for stop in self._stops)


def overlap(text: str, stop: str) -> int:
    """Where the longest end of `text` begins that `stop` begins with; its length where there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
