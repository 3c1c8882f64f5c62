from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st

from frontend.sample import Piece, Sample, TokenLogprob
from tests.support.demo import demo_tokenizer
from toka.messages import Finish
from toka.text.detokenize import detokenizer
from toka.text.vocabulary import Vocabulary

EOS = 2
STOPS = ["the", ". ", "\n\n", "naïve", "🦜!", "end"]


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary(demo_tokenizer())


def sample_of(stops: list[str], logprobs: bool = False, with_ids: bool = False) -> Sample:
    return Sample(0, 0, detokenizer(vocabulary()), stops, logprobs, with_ids=with_ids)


def entries(ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(number, -1.0, []) for number in ids]


def reference(ids: list[int], finish: Finish, stops: list[str]) -> tuple[str, Finish, int]:
    """Text, finish and counted tokens, found by decoding anew after every token."""
    tokenizer = vocabulary().tokenizer
    texts = ids[:-1] if finish == Finish.STOP else ids
    for count in range(1, len(texts) + 1):
        text = tokenizer.decode(texts[:count])
        # A character that is not complete is nothing yet; what stays malformed shows at the end.
        stable = text.rstrip("�") if count < len(texts) else text
        places = [(stable.find(stop) + len(stop), -len(stop)) for stop in stops if stop in stable]
        if places:
            end, minus = min(places)
            return text[: end + minus], Finish.STOP, count
    return tokenizer.decode(texts), finish, len(ids)


WORDS = st.sampled_from(["the ", "cat ", "end", ". ", "\n", "naïve", "🦜", "!", "世界", " ", "bland"])


@given(
    words=st.lists(WORDS, max_size=12),
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
    logprobs=st.booleans(),
    with_ids=st.booleans(),
    data=st.data(),
)
def test_text_finish_and_count_do_not_depend_on_how_the_ids_arrive(
    words: list[str], stops: list[str], finish: Finish, logprobs: bool, with_ids: bool, data: st.DataObject
) -> None:
    ids = vocabulary().tokenizer.encode("".join(words)).ids + ([EOS] if finish == Finish.STOP else [])
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    sample, pieces, given_ids = sample_of(stops, logprobs, with_ids), [], 0
    for cut in [*sorted(cuts), len(ids)]:
        if sample.finish:
            break
        run = ids[given_ids:cut]
        given_ids = cut
        last = finish if cut == len(ids) else Finish.NONE
        sample.add(run, last, entries(run) if logprobs else [])
        if data.draw(st.booleans()):
            pieces.append(sample.take())
    pieces.append(sample.take())
    text, ended, count = reference(ids, finish, stops)
    assert ("".join(piece.text for piece in pieces), sample.finish, sample.count) == (text, ended, count)
    if with_ids:
        assert [number for piece in pieces for number in piece.ids] == ids[:count]
        assert all([each.token for each in piece.logprobs] == piece.ids for piece in pieces) or not logprobs
        assert all(len(piece.offsets) == len(piece.logprobs) for piece in pieces)
    elif logprobs:
        check_logprobs(pieces, ids, text)


def check_logprobs(pieces: list[Piece], ids: list[int], text: str) -> None:
    tokens = [each.token for piece in pieces for each in piece.logprobs]
    offsets = [offset for piece in pieces for offset in piece.offsets]
    assert tokens == ids[: len(tokens)]
    assert offsets == sorted(offsets)
    assert b"".join(vocabulary()[token] for token in tokens).decode(errors="replace").startswith(text)
    told = 0
    for piece in pieces:
        assert all(told <= offset < told + max(1, len(piece.text)) for offset in piece.offsets)
        told += len(piece.text)


def test_a_stop_string_over_many_tokens_is_never_given_out() -> None:
    ids = vocabulary().tokenizer.encode("Alpha beta STOP HERE PLEASE gamma").ids
    sample = sample_of(["STOP HERE PLEASE"])
    taken = []
    for number in ids:
        if not sample.finish:
            sample.add([number], Finish.NONE, [])
            taken.append(sample.take().text)
    assert "".join(taken) == "Alpha beta "
    assert sample.finish == Finish.STOP
    before = len(vocabulary().tokenizer.encode("Alpha beta STOP HERE PLEASE").ids)
    assert sample.count == before


def test_without_stop_strings_ids_wait_until_somebody_takes_their_text() -> None:
    sample = sample_of([])
    for number in range(1000, 1100):
        sample.add([number], Finish.NONE, [])
    assert sample._made == 0
    assert sample.take().text == vocabulary().tokenizer.decode(list(range(1000, 1100)))
