from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toka.page_keys import KEY_BYTES, REMEMBERED_PROMPTS, PromptKeys, page_keys, split


def test_keys_are_split_as_they_were_joined():
    keys = page_keys(np.arange(20, dtype=np.int32), 4)
    assert split(b"".join(keys)) == keys and {len(key) for key in keys} == {KEY_BYTES}
    assert split(b"") == []


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
