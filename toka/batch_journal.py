"""The files of `toka-batch`: which lines of the input are answered already, which are left, and where answers go.

Memory is flat: no line is held for longer than it takes, and of each there are three flags (while the files are read
at the start, some 140 bytes). A line is known again by its custom_id; one that has none, or one that an earlier line
has, by its number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from toka.batch_lines import ENDPOINTS, Item, LineError, custom_id_of, key_of, order, read_item, read_lines

DUPLICATE = "duplicate_custom_id"
BEGINNING = b'{"id":"batch_req_'
"""Of every answer, by which one that was cut off is known."""
LINES_AT_ONCE = 2000
"""Read and sorted together."""
BYTES_AT_ONCE = 64 << 20
"""Of lines that are read and sorted together."""

Keys = NDArray[np.uint64]
"""[lines, 2]"""


@dataclass(slots=True)
class Line:
    """A line that is to be answered: by running it, or by what is wrong with it."""

    number: int
    item: Item | LineError
    order: bytes = b""


class _Error(Struct):
    code: str | None = None


class _Response(Struct):
    status_code: int


class _Written(Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


_written = msgspec.json.Decoder(_Written)


class Journal:
    """Reads `source` from its beginning and writes to `output`, failures to `errors` where that is another file.

    Raises ValueError, in one sentence, where a file cannot be had or holds something else than answers. `longest`:
    bytes of a line.
    """

    def __init__(self, source: Path, output: Path, errors: Path | None, longest: int) -> None:
        self._source, self._longest = source, longest
        paths = [output] if errors is None else [output, errors]
        with contextlib.ExitStack() as opened:
            if len({each.resolve() for each in [source, *paths]}) <= len(paths):
                raise ValueError("input, output and errors must be different files")
            keys, self._blank = self._read_source()
            self._descriptors = [_open(each, opened) for each in paths]
            written, self.failed = _read_answers(paths, self._descriptors)
            self._duplicate = _repeated(keys) & ~self._blank
            for number in np.flatnonzero(self._duplicate).tolist():
                keys[number] = _words(_line_key(number + 1))
            self._answered = _among(keys, written) & ~self._blank
            self._opened = opened.pop_all()
        self.total = len(keys) - int(self._blank.sum())
        self.done = int(self._answered.sum())
        """Lines that are answered, good or bad."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def left(self) -> Iterator[list[Line]]:
        """What is not answered, by portions, each in an order in which shared prefixes meet."""
        lines: list[Line] = []
        size = 0
        for number, content in self._lines(len(self._answered)):
            if self._answered[number - 1] or self._blank[number - 1]:
                continue
            lines.append(self._line(number, content))
            size += len(content)
            if len(lines) == LINES_AT_ONCE or size >= BYTES_AT_ONCE:
                yield sorted(lines, key=lambda line: line.order)
                lines, size = [], 0
        yield sorted(lines, key=lambda line: line.order)

    def write(self, answer: bytes, good: bool) -> None:
        """Put the answer to a line where it belongs. OSError where there is no room."""
        descriptor = self._descriptors[0 if good else -1]
        rest = memoryview(answer)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        self.done += 1
        self.failed += not good

    def _lines(self, count: int = sys.maxsize) -> Iterator[tuple[int, bytes]]:
        """The first `count` lines with their numbers; see `read_lines` for long ones."""
        for number, _, _, content in read_lines(self._source, 0, 1, self._longest, count):
            yield number, content

    def _read_source(self) -> tuple[Keys, NDArray[np.bool_]]:
        """The key of each line, and which lines are blank."""
        keys, blank = bytearray(), bytearray()
        try:
            for number, content in self._lines():
                name = custom_id_of(content) if len(content) <= self._longest else None
                keys += key_of(name) if name else _line_key(number)
                blank.append(not content.strip())
        except OSError as error:
            raise ValueError(f"{self._source}: {error.strerror}") from None
        return _words(keys).reshape(-1, 2).copy(), np.frombuffer(blank, np.bool_)

    def _line(self, number: int, content: bytes) -> Line:
        try:
            if len(content) > self._longest:
                raise LineError("request_too_large", f"line {number} is larger than {self._longest} bytes")
            if self._duplicate[number - 1]:
                raise LineError(DUPLICATE, f"line {number}: custom_id: given before", custom_id_of(content))
            item = read_item(content, number, ENDPOINTS)
            return Line(number, item, order(item.fields()))
        except LineError as error:
            return Line(number, error)


def _open(path: Path, opened: contextlib.ExitStack) -> int:
    """Open a file to append to it, for this process alone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        opened.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another process writes to it") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    return descriptor


def _read_answers(paths: Sequence[Path], descriptors: Sequence[int]) -> tuple[Keys, int]:
    """The keys of lines that have been answered, and how many of them failed. What was not written whole is cut off."""
    keys = bytearray()
    failed = 0
    for path, descriptor in zip(paths, descriptors):
        whole = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and line.startswith(BEGINNING[: len(line)]):
                    break
                try:
                    written = _written.decode(line)
                    keys += _written_key(written)
                except (ValueError, RecursionError):
                    raise ValueError(f"{path}: line {number} is no answer of toka-batch; name another file") from None
                failed += written.response is None or written.response.status_code != 200
                whole += len(line)
        os.ftruncate(descriptor, whole)
    return _words(keys).reshape(-1, 2), failed


def _written_key(written: _Written) -> bytes:
    if written.custom_id and not (written.error and written.error.code == DUPLICATE):
        return key_of(written.custom_id)
    return _line_key(int(written.id.rpartition("_")[2]))


def _line_key(number: int) -> bytes:
    return key_of(str(number), b"line")


def _words(keys: bytes | bytearray) -> NDArray[np.uint64]:
    return np.frombuffer(keys, np.uint64)


def _repeated(keys: Keys) -> NDArray[np.bool_]:
    """Which of them came before."""
    ranked = np.lexsort(keys.T)
    repeated = np.zeros(len(keys), np.bool_)
    repeated[ranked[1:][(keys[ranked[1:]] == keys[ranked[:-1]]).all(axis=1)]] = True
    return repeated


def _among(keys: Keys, others: Keys) -> NDArray[np.bool_]:
    """Which of `keys` are among `others` as well."""
    both = np.concatenate([others, keys])
    ranked = np.lexsort(both.T)
    group = np.empty(len(both), np.int64)
    group[ranked] = np.cumsum(np.r_[True, (both[ranked[1:]] != both[ranked[:-1]]).any(axis=1)][: len(both)])
    among = np.zeros(len(both) + 1, np.bool_)
    among[group[: len(others)]] = True
    return among[group[len(others) :]]
