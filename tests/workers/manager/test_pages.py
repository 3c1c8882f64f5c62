from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.manager.pages import REMEMBERED_PROMPTS, PagePool, PromptKeys, page_keys


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with prefixes, grow and go; the pool never loses or doubles a page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.held: list[np.ndarray] = []

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


def test_keys_depend_on_everything_before():
    a, b = np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32)
    b[0] = 99
    assert page_keys(a, 4)[1] != page_keys(b, 4)[1]
    assert page_keys(a[:7], 4) == page_keys(a, 4)[:1]
    assert page_keys(a, 4, page_keys(a, 4)[:1]) == page_keys(a, 4)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 12)), max_size=12), st.integers(1, 5))
def test_prompt_keys_are_those_of_the_pages(prompts, page_size):
    """Whatever was asked before: prompts that share a beginning, repeat, are shorter or longer."""
    keys = PromptKeys(page_size)
    for first, length, fork in prompts:
        ids = np.arange(length, dtype=np.int32)
        ids[:1] = first
        ids[fork:] += 100
        assert keys.of(ids) == page_keys(ids, page_size)


def test_prompt_keys_remember_so_many_prompts():
    keys = PromptKeys(4)
    for number in range(3 * REMEMBERED_PROMPTS):
        keys.of(np.full(8, number, np.int32))
    assert len(keys._last) == REMEMBERED_PROMPTS
