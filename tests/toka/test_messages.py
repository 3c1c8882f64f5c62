"""The wire format: what goes in comes out, and nothing else does."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from toka import messages
from toka.messages import VERSION, Cancel, Message, MessageError, Plan, Submit, Tokens, decode, encode

KINDS = [kind for kind in vars(messages).values() if isinstance(kind, type) and hasattr(kind, "code")]
KINDS = [kind for kind in KINDS if kind is not Message]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return arrays.arrays(args[1], st.integers(0, 20))
    if origin is list:
        return st.lists(values(args[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=4)
    if type(None) in args:
        return st.none() | values(next(each for each in args if each is not type(None)))
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{each.name: values(hints[each.name]) for each in dataclasses.fields(hint)})
    if hint == messages.Frame:
        return st.binary(max_size=20)
    plain = {
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(),
        bytes: st.binary(max_size=40),
    }
    return plain[hint]


def frame_values(kind: type[Message]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {each.name: values(hints[each.name]) for each in dataclasses.fields(kind) if each.name != "payload"}
    if any(each.name == "payload" for each in dataclasses.fields(kind)):
        fields["payload"] = st.lists(st.binary(max_size=20), max_size=3)
    return st.builds(kind, **fields)


def same(left: Message, right: Message) -> bool:
    pairs = ((getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return type(left) is type(right) and all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") if isinstance(a, np.ndarray) else a == b for a, b in pairs
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_comes_out_as_it_went_in(kind: type[Message], data: st.DataObject):
    message = data.draw(frame_values(kind))
    assert same(decode([bytes(frame) for frame in encode(message)]), message)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_noise_is_refused(frames: list[bytes]):
    with pytest.raises(MessageError):
        decode(frames)


@given(data=st.data())
def test_a_damaged_message_is_refused_or_still_of_its_types(data: st.DataObject):
    message = data.draw(frame_values(data.draw(st.sampled_from(KINDS))))
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(frames))
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = decode([bytes(frame) for frame in frames])
    except MessageError:
        return
    hints = typing.get_type_hints(type(damaged))
    for each in dataclasses.fields(damaged):
        if isinstance(hints[each.name], type):
            assert type(getattr(damaged, each.name)) is hints[each.name]


@pytest.mark.parametrize(
    "head",
    [
        [Cancel.code, VERSION + 1, b"r", []],
        [Cancel.code, VERSION, b"r"],
        [Cancel.code, VERSION, b"r", [], 1],
        [Cancel.code, VERSION, "r", []],
        [Cancel.code, VERSION, b"r", [True]],
        [Cancel.code, VERSION, b"r", [1.0]],
        [Cancel.code, VERSION, b"r", None],
        [250, VERSION],
        {"code": Cancel.code},
        [True, VERSION, b"r", []],
    ],
)
def test_wrong_versions_types_and_counts_are_refused(head: Any):
    with pytest.raises(MessageError):
        decode([msgpack.packb(head)])


def test_frames_that_are_missing_odd_or_too_many_are_refused():
    cancel = encode(Cancel(request=b"r", samples=[1]))
    with pytest.raises(MessageError):
        decode([*cancel, b"more"])
    tokens = encode(empty(Tokens))
    with pytest.raises(MessageError):
        decode(tokens[:-1])
    with pytest.raises(MessageError):
        decode([*tokens[:-1], b"odd"])


def empty(kind: type[Message]) -> Any:
    """A message of this type whose arrays and lists are empty."""
    hints = typing.get_type_hints(kind)
    blank = {int: 0, bytes: b"", float: 0.0, str: "", bool: False}
    return kind(**{f.name: blank.get(hints[f.name], []) for f in dataclasses.fields(kind)})


def test_a_payload_passes_undecoded_and_arrays_are_read_only_views():
    payload = [b"\xc1 not a message", b""]
    submit = Submit(
        frontend=b"f", request=b"r", first_sample=0, sequences=1, prompt_tokens=3, priority=0, page_hashes=b"",
        payload=payload,
    )  # fmt: skip
    decoded = decode(encode(submit))
    assert isinstance(decoded, Submit) and decoded.payload == payload
    plan = dataclasses.replace(empty(Plan), tokens=np.arange(5, dtype=np.int32))
    frames = [bytes(frame) for frame in encode(plan)]
    received = decode(frames)
    assert isinstance(received, Plan) and received.tokens.tolist() == [0, 1, 2, 3, 4]
    assert not received.tokens.flags.writeable and not received.tokens.flags.owndata
