"""Where a JSON object ends in text that arrives in pieces."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"[^\s0-9+\-.,:eEtrufalsn]")
"""What means something outside strings, or cannot be there; the rest are numbers, words and separators."""
_INSIDE = re.compile(r'["\\]')


class JsonEnd:
    """Reads text that begins with an object, and finds its end, or the first character that cannot be part of it."""

    __slots__ = ("_depth", "_escaped", "_in_string", "broken")

    def __init__(self) -> None:
        self.broken = False
        self._in_string = False
        self._escaped = False
        self._depth = 0

    def feed(self, text: str) -> int:
        """The place in `text` behind the end, or of what breaks it off; -1 where neither is there."""
        place = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while found := (_INSIDE if self._in_string else _OUTSIDE).search(text, place):
            place, character = found.end(), found[0]
            if character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = place == len(text)
                place += 1
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return place
            else:
                self.broken = True
                return place - 1
        return -1
