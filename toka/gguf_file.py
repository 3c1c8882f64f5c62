"""Reads a GGUF file's metadata and tensors from a memory map.

The `gguf` package's own reader makes an array object of every token and merge (2.4 s and 160 MB for a
vocabulary of 49,152); this one reads them as lists of strings. Dequantisation is the package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FLOAT32 = 0
"""The ggml type number of plain float32."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ROWS = 256


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    """Outermost dimension first, as numpy has it."""
    kind: int
    """A ggml type number."""
    offset: int
    """Bytes from the start of the file."""


class GgufFile:
    """`metadata` by key (arrays are lists) and `tensors` by name. ValueError for what is no GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from None
        if self._map[:4] != MAGIC:
            raise ValueError(f"{path}: is not a GGUF file")
        try:
            self._parse()
        except (struct.error, KeyError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: is a broken GGUF file: {error}") from None

    def _parse(self) -> None:
        cursor = _Cursor(self._map, len(MAGIC))
        version, tensors, pairs = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
        if version not in VERSIONS:
            raise ValueError(f"{self.path}: GGUF version {version} is not supported; expected 2 or 3")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name = cursor.string()
            shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
            infos[name] = TensorInfo(shape[::-1], cursor.scalar("I"), cursor.scalar("Q"))
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.at // alignment) * alignment
        self.tensors = {k: TensorInfo(t.shape, t.kind, start + t.offset) for k, t in infos.items()}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor, dequantised to float32. ValueError where it is cut off or of a type not supported."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.kind)
        except ValueError:
            raise ValueError(f"{self.path}: {name} is of unknown type {info.kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = info.shape[-1] // block * block_bytes
        size = row_bytes * math.prod(info.shape[:-1])
        if info.offset + size > len(self._map):
            raise ValueError(f"{self.path}: {name} is cut off")
        # Blocks stand on their own, and `dequantize` goes through 16 rows at a time: long rows take it half the time.
        data = np.frombuffer(self._map, np.uint8, size, info.offset).reshape(math.gcd(info.shape[0], _ROWS), -1)
        try:
            values = dequantize(data, kind)
        except NotImplementedError:
            raise ValueError(f"{self.path}: {name} is of type {kind.name}, which is not supported") from None
        return np.require(values, np.float32, "W").reshape(info.shape)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        start = self.at + 8
        self.at = start + length
        if self.at > len(self.data):
            raise struct.error("a string runs past its end")
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{_SCALARS[item]}")
        return list(values)
