"""Token ids to text, piece by piece.

The pieces of a sample, joined, equal `tokenizer.decode` of all its ids; special tokens are left out, and
no piece ends within a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from toka.text.vocabulary import Vocabulary


class Detokenizer(Protocol):
    """The text of one sample. Costs time in proportion to the new ids."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        ...

    def flush(self) -> str:
        """What was held back, once no id follows."""
        ...


def detokenizer(vocabulary: Vocabulary, skipped: frozenset[int] | None = None) -> Detokenizer:
    """`skipped`: ids that stand for no text; None: those of all special tokens."""
    kind = ByteDetokenizer if vocabulary.byte_level else WindowDetokenizer
    return kind(vocabulary, vocabulary.special if skipped is None else skipped)


class ByteDetokenizer:
    """For byte-level vocabularies: the tokens' bytes, decoded as they come.

    Python's incremental UTF-8 decoder and the tokenizer's own decoding replace the same malformed
    sequences (both each maximal subpart, as Unicode recommends), so the texts agree for any ids.
    """

    __slots__ = ("_decode", "_skipped", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary, self._skipped = vocabulary, skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, ids: Sequence[int]) -> str:
        if not self._skipped.isdisjoint(ids):
            ids = [number for number in ids if number not in self._skipped]
        return self._decode(b"".join([self._vocabulary[number] for number in ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other decoder: decodes the new ids behind the last one whose text is known.

    What a decoder does to a token may depend on the token before it (a space between words, none at the
    start), not on those further back. A run of byte tokens is decoded when it has ended, as its text is
    known only then.
    """

    __slots__ = ("_known", "_skipped", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary, self._skipped = vocabulary, skipped
        self._window: list[int] = []
        self._known = 0
        """Characters of the window's text that were given out."""

    def feed(self, ids: Sequence[int]) -> str:
        # An id that no token has stands for nothing: not even for the end of a run of bytes.
        new = [number for number in ids if number not in self._skipped and self._vocabulary[number]]
        self._window += new
        return "" if not new or self._vocabulary.is_byte(new[-1]) else self._advance()

    def flush(self) -> str:
        return self._advance()

    def _advance(self) -> str:
        text = self._text()[self._known :]
        self._window = self._window[-1:]
        self._known = len(self._text())
        return text

    def _text(self) -> str:
        return self._vocabulary.tokenizer.decode(self._window, skip_special_tokens=False)
