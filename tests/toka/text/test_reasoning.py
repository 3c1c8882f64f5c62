from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka.text.reasoning import ThinkSplitter, begins_inside, thinks

CASES = [
    ("<think>\nhm, 2\n</think>\n\nTwo", False, "hm, 2", "Two"),
    (" \n<think>a</think>b", False, "a", "b"),
    ("<think>\n\n</think>\n\nTwo\n", False, "", "Two\n"),
    ("hm\n\nso\n</think>\n\nTwo </think> <think>x", True, "hm\n\nso", "Two </think> <think>x"),
    ("\nhm <think> again", True, "hm <think> again", ""),
    ("<think>a\n</thin", False, "a\n</thin", ""),
    ("<think>a</th b</think>", False, "a</th b", ""),
    ("Two <think>x</think>", False, "", "Two <think>x</think>"),
    ("\n\n Two", False, "", "\n\n Two"),
    ("<thin", False, "", "<thin"),
    ("<think>", False, "", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "answer"), CASES)
@given(data=st.data())
def test_wherever_the_text_is_cut(text: str, inside: bool, reasoning: str, answer: str, data: st.DataObject) -> None:
    splitter, begin = ThinkSplitter(inside), 0
    pieces = []
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(text))))), len(text)]:
        pieces.append(splitter.feed(text[begin:end]))
        begin = end
    pieces.append(splitter.flush())
    assert ("".join(each[0] for each in pieces), "".join(each[1] for each in pieces)) == (reasoning, answer)


def test_no_more_is_held_back_than_may_become_a_tag() -> None:
    splitter = ThinkSplitter(False)
    assert [splitter.feed(text) for text in ("<think>", "a\n", "b</", "c", "</think>", "\n", "d", "\n")] == [
        ("", ""), ("a", ""), ("\nb", ""), ("</c", ""), ("", ""), ("", ""), ("", "d"), ("", "\n"),
    ]  # fmt: skip


def test_where_a_block_is_open_already() -> None:
    assert begins_inside("<|im_start|>assistant\n<think>\n", "")
    assert begins_inside("assistant\n<think>\nLet me", "<think>\nLet me")
    assert not begins_inside("what is <think>?<|im_end|>\n<|im_start|>assistant\n", "")
    assert not begins_inside("x", "<think>\na</think>\n\nSo")
    assert thinks("{{ '<think>' }}{{ '</think>' }}") and not thinks("{{ messages }}")
