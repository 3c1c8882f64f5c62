from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.demo import demo_tokenizer
from toka.text.detokenize import ByteDetokenizer, WindowDetokenizer, detokenizer
from toka.text.vocabulary import Vocabulary

SPECIAL = AddedToken("<s>", special=True, normalized=False)
ADDED = AddedToken("<think>", special=False, normalized=False)
WORDS = ["▁the", "▁cat", "s", "▁", "▁▁", ".", "né", "世", "�", "\n"]


@functools.cache
def byte_level() -> Tokenizer:
    """Every byte a token, and added tokens whose text is not in the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([ADDED, "two words", "naïve 世"])
    return tokenizer


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([ADDED])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """As the tokenizers of Llama 2."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(steps))


@functools.cache
def metaspace() -> Tokenizer:
    return _sentencepiece(decoders.Metaspace())


TOKENIZERS = [demo_tokenizer, byte_level, byte_fallback, metaspace]


@pytest.mark.parametrize("make", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_of_random_ids_join_to_what_the_tokenizer_decodes(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    text = detokenizer(Vocabulary(tokenizer))
    pieces = [text.feed(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)])]
    assert "".join([*pieces, text.flush()]) == tokenizer.decode(ids)


def test_an_id_without_a_token_does_not_end_a_run_of_bytes() -> None:
    tokenizer = byte_fallback()
    ids = [0xC3, tokenizer.get_vocab_size() + 1, 0xA9, 0x80]
    text = detokenizer(Vocabulary(tokenizer))
    assert "".join([*(text.feed([number]) for number in ids), text.flush()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", TOKENIZERS)
@given(data=st.data())
def test_a_piece_never_holds_a_part_of_a_character(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """Real text, token by token: what is given out is always how the text begins."""
    tokenizer = make()
    words = st.sampled_from(["the", "cats", "naïve", "世界", "👩‍👩‍👧", "🇫🇷", "é", "\n", "123", "ﬁ"])
    whole = " ".join(data.draw(st.lists(words, max_size=8)))
    ids = _byte_ids(tokenizer, whole) if make is byte_fallback else tokenizer.encode(whole).ids
    if make is metaspace:
        ids = [number for number in ids if number >= 256]
    want = tokenizer.decode(ids)
    text, so_far = detokenizer(Vocabulary(tokenizer)), ""
    for number in ids:
        so_far += text.feed([number])
        assert want.startswith(so_far)
    assert so_far + text.flush() == want


def _byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Spaces as their token, all else as bytes: every character in pieces."""
    return [tokenizer.token_to_id("▁" if byte == 32 else f"<0x{byte:02X}>") for byte in text.encode()]


def test_the_vocabulary_knows_which_kind_it_is() -> None:
    kinds = {ByteDetokenizer: [demo_tokenizer, byte_level], WindowDetokenizer: [byte_fallback, metaspace]}
    for kind, makes in kinds.items():
        for make in makes:
            assert type(detokenizer(Vocabulary(make()))) is kind


def test_an_emoji_arrives_whole_however_many_tokens_it_takes() -> None:
    ids = demo_tokenizer().encode("🦜").ids
    assert len(ids) > 1
    text = detokenizer(Vocabulary(demo_tokenizer()))
    assert [text.feed([number]) for number in ids] == [""] * (len(ids) - 1) + ["🦜"]


def test_special_tokens_are_no_text_and_added_ones_are() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    special, added = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("<think>")
    text = detokenizer(vocabulary)
    assert text.feed([special, added, special]) == "<think>"
    assert vocabulary[special] == b"<s>"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_the_bytes_of_the_tokens_are_those_of_the_text(make: Callable[[], Tokenizer]) -> None:
    """But for spaces at the start, which SentencePiece decoders drop."""
    tokenizer = make()
    vocabulary = Vocabulary(tokenizer)
    first = 256 if make is metaspace else 0
    for number in range(first, vocabulary.size, 97 if vocabulary.size > 1000 else 1):
        alone = tokenizer.decode([number], skip_special_tokens=False)
        assert vocabulary[number].decode(errors="replace").lstrip(" ") == alone.lstrip(" ")


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    vocabulary = Vocabulary(demo_tokenizer())
    assert vocabulary[vocabulary.size + 10] == b""
    assert vocabulary.longest() == max(len(vocabulary[number]) for number in range(vocabulary.size))


def test_a_long_run_of_bytes_that_are_no_text_costs_no_more_than_its_length() -> None:
    """A window that were decoded again at every byte would take minutes for this."""
    tokenizer = byte_fallback()
    text = detokenizer(Vocabulary(tokenizer))
    pieces = [text.feed([255]) for _ in range(100_000)]
    assert "".join(pieces) + text.flush() == "�" * 100_000
