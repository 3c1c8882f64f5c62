from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.manager.pages import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with prefixes, grow and go; the pool never loses or doubles a page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.held: list[np.ndarray] = []
        self.told: set[bytes] = set()
        """Keys that can be found, by what `changes` has said."""

    @rule(prefix=st.integers(0, 2), length=st.integers(1, 5))
    def start(self, prefix: int, length: int) -> None:
        keys = [bytes([prefix, i]) for i in range(length)]
        known = self.pool.match(keys)
        self.pool.share(known)
        if length - len(known) > self.pool.available:
            self.pool.release(known)
            return
        pages = np.concatenate([known, self.pool.take(length - len(known))])
        assert len(set(pages.tolist())) == length
        self.pool.key(pages.tolist(), keys)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def finish(self, which: int) -> None:
        self.pool.release(self.held.pop(which % len(self.held)))

    @rule()
    def publish(self) -> None:
        inserted, evicted = self.pool.changes()
        self.told |= set(inserted)
        self.told -= set(evicted)
        assert self.told == set(self.pool.known())
        assert self.pool.changes() == ([], [])

    @invariant()
    def whole(self) -> None:
        self.pool.check()
        counts = np.bincount(np.concatenate([np.empty(0, np.int64), *self.held]).astype(int), minlength=12)
        assert (counts == self.pool.refs).all()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None)


def test_idle_pages_go_oldest_first_and_children_before_parents():
    pool = PagePool(6)
    first, second = pool.take(3), pool.take(3)
    for name, pages in ((b"a", first), (b"b", second)):
        pool.key(pages.tolist(), [name + bytes([i]) for i in range(3)])
    pool.release(first)
    pool.release(second)
    pool.take(1)
    assert len(pool.match([b"a\0", b"a\1", b"a\2"])) == 2
    pool.take(3)
    assert len(pool.match([b"a\0"])) == 0 and len(pool.match([b"b\0", b"b\1", b"b\2"])) == 2


def test_a_page_cannot_be_released_twice():
    pool = PagePool(2)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(AssertionError):
        pool.release(pages)


def test_what_is_told_of_changes_is_how_it_is_now_parents_first():
    pool = PagePool(3)
    pages = pool.take(3)
    pool.key(pages.tolist(), [b"a0", b"a1", b"a2"])
    assert pool.changes() == ([b"a0", b"a1", b"a2"], [])
    pool.release(pages)
    pool.key(pool.take(2).tolist(), [b"a2", b"b0"])
    assert pool.changes() == ([b"a2", b"b0"], [b"a1"]), "a2 went and came back"
    assert sorted(pool.known()) == [b"a0", b"a2", b"b0"]
