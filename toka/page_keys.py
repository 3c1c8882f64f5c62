"""Keys of a prompt's full KV pages: a replica finds cached pages by them, and the broker the replica that has them."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from toka.messages import Int32

KEY_BYTES = 16
REMEMBERED_PROMPTS = 64


def page_keys(ids: Int32, page_size: int, keys: list[bytes] | None = None) -> list[bytes]:
    """Keys of the full pages of `ids`, each the hash of its tokens and of the page before it.

    `keys` are those of the first pages where they are known already.
    """
    keys = list(keys or ())
    content = np.ascontiguousarray(ids[len(keys) * page_size :], np.int32).tobytes()
    width = 4 * page_size
    key = keys[-1] if keys else b""
    for start in range(0, len(content) - width + 1, width):
        key = blake2b(key + content[start : start + width], digest_size=KEY_BYTES).digest()
        keys.append(key)
    return keys


def split(keys: bytes) -> list[bytes]:
    """The keys that stand one after another in `keys`, as messages carry them."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class PromptKeys:
    """Keys of prompts' full pages. What a prompt has in common with the last one of the same first page is not
    hashed again: requests on one document, or behind the same examples, tend to come together.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._last: OrderedDict[bytes, tuple[Int32, list[bytes]]] = OrderedDict()
        """A prompt and its keys by the bytes of the prompt's first page, the longest unused first."""

    def of(self, prompt: Int32) -> list[bytes]:
        size = self.page_size
        if len(prompt) < size:
            return []
        first = prompt[:size].tobytes()
        known: list[bytes] = []
        if (last := self._last.pop(first, None)) is not None:
            both = min(len(prompt), len(last[0])) // size * size
            same = prompt[:both] == last[0][:both]
            known = last[1][: (both if same.all() else int(np.argmin(same))) // size]
        keys = page_keys(prompt, size, known)
        self._last[first] = prompt, keys
        if len(self._last) > REMEMBERED_PROMPTS:
            self._last.popitem(last=False)
        return keys
