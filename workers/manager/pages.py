"""The KV pages of a replica: who holds them, which hold a known prefix, which can be given away.

A page is free (content worthless), held (by one sequence or shared by several), or idle: held by none, but
full of the KV of a known prefix, kept until its room is needed. Idle pages go in the order in which they
were let go, and a sequence lets go of its last page first, so children always go before their parents.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from toka.messages import Int32


class PagePool:
    """`num_pages` pages, numbered from 0."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, np.int32)
        """How many sequences hold each page."""
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._changed: dict[bytes, None] = {}
        """Keys that came or went since `changes` was last called, in that order."""

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return self._num_free + len(self._idle)

    @property
    def held(self) -> int:
        return self.num_pages - self.available

    def take(self, count: int) -> Int32:
        """`count` pages for one holder each; idle ones are forgotten for them, the longest idle first."""
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        if count > self._num_free:
            self._evict(count - self._num_free)
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count][::-1].copy()
        self.refs[pages] = 1
        return pages

    def _evict(self, count: int) -> None:
        pages = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            key = self._key_of.pop(page)
            del self._page_of[key]
            self._changed[key] = None
        self._give(np.array(pages, np.int32))

    def _give(self, pages: Int32) -> None:
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def share(self, pages: Int32) -> None:
        """One more holder for each of `pages` (each at most once), held or idle."""
        for page in pages[self.refs[pages] == 0].tolist():
            del self._idle[page]
        self.refs[pages] += 1

    def release(self, pages: Int32) -> None:
        """One holder less for each of `pages`, given in the order of the sequence."""
        self.refs[pages] -= 1
        assert (self.refs[pages] >= 0).all(), "a page was released by one that did not hold it"
        last = pages[self.refs[pages] == 0][::-1]
        keyed = [page for page in last.tolist() if page in self._key_of]
        self._idle.update(dict.fromkeys(keyed))
        if len(keyed) < len(last):
            idle = set(keyed)
            self._give(np.array([page for page in last.tolist() if page not in idle], np.int32))

    def key(self, pages: list[int], keys: list[bytes]) -> None:
        """Say that held `pages` have, or will have before any later plan runs, the content that `keys` name.

        Where another page has it already, that one stays the one to share.
        """
        page_of, key_of = self._page_of, self._key_of
        for page, key in zip(pages, keys):
            if key not in page_of and page not in key_of:
                page_of[key] = page
                key_of[page] = key
                self._changed[key] = None

    def match(self, keys: list[bytes]) -> Int32:
        """The pages of the longest known prefix of `keys`."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return np.array(pages, np.int32)

    def known(self) -> list[bytes]:
        """The keys of all pages that can be found."""
        return list(self._page_of)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of pages that can be found and of those that cannot any more, where that may have changed since the
        last call."""
        changed, self._changed = self._changed, {}
        inserted = [key for key in changed if key in self._page_of]
        evicted = [key for key in changed if key not in self._page_of] if len(inserted) < len(changed) else []
        return inserted, evicted

    def check(self) -> None:
        """Assert what must always hold; for tests."""
        free = self._free[: self._num_free].tolist()
        assert len(set(free)) == len(free) and not set(free) & set(self._idle)
        assert (self.refs[free] == 0).all() and (self.refs[list(self._idle)] == 0).all()
        assert int((self.refs == 0).sum()) == len(free) + len(self._idle), "a page leaked"
        assert all(self._page_of[key] == page for page, key in self._key_of.items())
        assert set(self._idle) <= set(self._key_of) and not set(free) & set(self._key_of)
