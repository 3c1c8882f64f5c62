"""Every message that crosses a ZeroMQ socket, and the one way they are encoded.

On the wire a message is a header frame, MessagePack `[code, VERSION, *plain fields]`, followed by one
raw frame for each array field and, for messages with a `payload`, by frames that only the final
receiver decodes. Arrays travel as their bytes in the dtype declared here, little-endian, and arrive
one-dimensional.

Request ids are 16 random bytes. A *shard* is a range of samples of one request; the broker routes and
counts by shard, so `(request, first_sample)` names one.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar, Union

import msgpack
import numpy as np
from numpy.typing import NDArray

VERSION = 1
REQUEST_ID_BYTES = 16

Frame = bytes | memoryview
Int32 = Annotated[NDArray[np.int32], np.int32]
Int64 = Annotated[NDArray[np.int64], np.int64]
Uint8 = Annotated[NDArray[np.uint8], np.uint8]
Float32 = Annotated[NDArray[np.float32], np.float32]


def no_ints() -> Int32:
    return np.empty(0, np.int32)


def no_floats() -> Float32:
    return np.empty(0, np.float32)


class MessageError(ValueError):
    """The frames are not a message of this version, or not of its declared types."""


class Finish(enum.IntEnum):
    """Why a sample ended; NONE while it runs."""

    NONE = 0
    STOP = 1
    """An end-of-sequence or stop id was sampled; it is the last token of the sample and carries no text."""
    LENGTH = 2
    ABORT = 3


# --- The request itself: opaque to the broker ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn. Defaults draw from the raw distribution."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all of the vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    """64 bits, unsigned; drawn by the frontend where the client gave none."""
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int = -1
    """-1: none; 0: of the chosen token; k: also of the k most likely."""
    prompt_logprobs: int = -1
    """As `logprobs`, of every id of the prompt but the first."""
    grammar: str = ""
    """What the output has to match, as llguidance takes it (JSON); empty: anything."""
    grammar_after: int = -1
    """The output's first id after which the grammar begins (the end of a think block); -1: it begins at once."""

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


# --- The framework ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    code: ClassVar[int]


_CODES: dict[int, type[Message]] = {}
M = TypeVar("M", bound=type[Message])


Reader = Callable[[Any, str], Any]
"""Gives a plain value as the type it was made for; MessageError, which names the field, where it is not of it."""


@dataclass(frozen=True, slots=True)
class _Layout:
    plain: tuple[tuple[str, Reader], ...]
    arrays: tuple[tuple[str, np.dtype[Any]], ...]
    payload: bool


_LAYOUTS: dict[type[Message], _Layout] = {}


def _layout(cls: type[Message]) -> _Layout:
    hints = typing.get_type_hints(cls, include_extras=True)
    plain: list[tuple[str, Reader]] = []
    arrays: list[tuple[str, np.dtype[Any]]] = []
    payload = False
    for each in dataclasses.fields(cls):
        hint = hints[each.name]
        if typing.get_origin(hint) is Annotated:
            arrays.append((each.name, np.dtype(hint.__metadata__[0]).newbyteorder("<")))
        elif each.name == "payload":
            payload = True
        else:
            plain.append((each.name, _reader(hint)))
    return _Layout(tuple(plain), tuple(arrays), payload)


def message(code: int) -> Any:
    """Class decorator: declare `code` as the wire code of a Message."""

    def register(cls: M) -> M:
        assert code not in _CODES, f"two messages share code {code}"
        cls.code = code
        _CODES[code] = cls
        _LAYOUTS[cls] = _layout(cls)
        return cls

    return register


@functools.cache
def _names(cls: type) -> list[str]:
    return [each.name for each in dataclasses.fields(cls)]


def _values(value: Any) -> list[Any]:
    """The fields of a dataclass; TypeError for anything else, which no message holds."""
    kind: Any = type(value)
    return [getattr(value, name) for name in _names(kind)]


def encode(msg: Message) -> list[Frame]:
    """The frames of a message. Arrays are not copied: do not change one before it has been sent."""
    layout = _LAYOUTS[type(msg)]
    head = [msg.code, VERSION, *(getattr(msg, name) for name, _ in layout.plain)]
    frames: list[Frame] = [msgpack.packb(head, default=_values)]
    for name, dtype in layout.arrays:
        array = np.ascontiguousarray(getattr(msg, name), dtype=dtype)
        frames.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
    if layout.payload:
        frames.extend(msg.payload)  # type: ignore[attr-defined]
    return frames


def decode(frames: Sequence[Frame]) -> Message:
    """The message in `frames`; arrays are read-only views of them.

    Raises MessageError for anything that is not exactly one known message of this version.
    """
    if not frames:
        raise MessageError("no frames")
    try:
        head = msgpack.unpackb(frames[0], strict_map_key=False)
    except Exception as error:  # msgpack raises a dozen unrelated types
        raise MessageError(f"the header is not MessagePack: {error}") from None
    if not isinstance(head, list) or len(head) < 2 or not all(type(item) is int for item in head[:2]):
        raise MessageError("the header is not [code, version, ...]")
    if head[1] != VERSION:
        raise MessageError(f"message version {head[1]}, expected {VERSION}")
    cls = _CODES.get(head[0])
    if cls is None:
        raise MessageError(f"unknown message code {head[0]}")
    return _build(cls, head[2:], frames[1:])


def _build(cls: type[Message], plain: list[Any], rest: Sequence[Frame]) -> Message:
    layout = _LAYOUTS[cls]
    arrays = len(layout.arrays)
    if len(plain) != len(layout.plain) or len(rest) < arrays or (len(rest) > arrays and not layout.payload):
        raise MessageError(f"{cls.__name__}: wrong number of fields or frames")
    values: dict[str, Any] = {}
    try:
        for (name, read), value in zip(layout.plain, plain):
            values[name] = read(value, name)
    except MessageError as error:
        raise MessageError(f"{cls.__name__}.{error}") from None
    for (name, dtype), frame in zip(layout.arrays, rest):
        if len(frame) % dtype.itemsize:
            raise MessageError(f"{cls.__name__}.{name}: {len(frame)} bytes are no {dtype} array")
        values[name] = np.frombuffer(frame, dtype=dtype)
    if layout.payload:
        values["payload"] = list(rest[arrays:])
    return cls(**values)


def _reader(hint: Any) -> Reader:
    """The Reader of the type `hint`: a scalar, list, dict, optional or dataclass. Made once for each field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (_reader(each) for each in arguments if each is not type(None))
        return lambda value, where: None if value is None else inner(value, where)
    if origin is list:
        return _list_reader(*arguments)
    if origin is dict:
        return _dict_reader(*arguments)
    return _fields_reader(hint) if dataclasses.is_dataclass(hint) else _scalar_reader(hint)


def _scalar_reader(kind: type) -> Reader:
    def read(value: Any, where: str) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise MessageError(f"{where}: expected {kind.__name__}")

    return read


def _list_reader(item: Any) -> Reader:
    inner = _reader(item)

    def read(value: Any, where: str) -> list[Any]:
        if type(value) is not list:
            raise MessageError(f"{where}: expected list")
        return value if set(map(type, value)) <= {item} else [inner(each, where) for each in value]

    return read


def _dict_reader(key: Any, item: Any) -> Reader:
    keys, items = _reader(key), _reader(item)

    def read(value: Any, where: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise MessageError(f"{where}: expected dict")
        return {keys(k, where): items(v, where) for k, v in value.items()}

    return read


def _fields_reader(cls: Any) -> Reader:
    hints = typing.get_type_hints(cls)
    readers = [(name, _reader(hints[name])) for name in _names(cls)]

    def read(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise MessageError(f"{where}: expected {cls.__name__}")
        return cls(**{name: inner(each, name) for (name, inner), each in zip(readers, value)})

    return read


# --- Frontend, broker and manager ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a replica serves, as the frontends need to know it."""

    name: str
    vocab_size: int
    context_length: int
    """Most tokens of prompt and output together."""
    kv_cache_tokens: int
    page_size: int
    eos_token_ids: list[int]
    max_logprobs: int


@message(1)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinFrontend(Message):
    """Frontend to broker: at connect, to every new incarnation of the broker, and every second as a sign of life."""

    holds: list[bytes]
    """Request ids of the shards it waits for ..."""
    holds_first: list[int]
    """... and their first samples."""


@message(2)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinReplica(Message):
    """Manager to broker: at connect, to every new incarnation of the broker, and while it is silent."""

    replica: str
    epoch: int
    """Drawn at the manager's start: a replica that comes back is another epoch, and the old one is fenced."""
    credits: int
    """Sequences the manager is willing to hold, running and waiting."""
    card: ModelCard
    holds: list[bytes]
    """Request ids of the shards it has and that were not released, and for each ..."""
    holds_first: list[int]
    holds_sequences: list[int]
    """... its sequences that have not ended, ..."""
    holds_priorities: list[int]
    holds_frontends: list[bytes]
    """... and the frontend it belongs to."""


@message(3)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State(Message):
    """Broker to frontends and managers: on joining, on change, and four times a second."""

    incarnation: int
    replicas: int
    """Replicas that are alive and may be given work."""
    queued: int
    """Shards that wait in the broker."""
    card: ModelCard | None
    draining: bool
    share: int = 0
    """Samples of one prompt that a replica should get together, for the others to get theirs; 0: as many as wished."""


@message(4)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit(Message):
    """Frontend to broker, and onward to a manager: run one shard.

    What the broker routes by is in the header; `payload` is an encoded `Work`.
    """

    frontend: bytes
    """The sender's identity, where results go."""
    request: bytes
    first_sample: int
    sequences: int
    prompt_tokens: int
    priority: int
    """Lower is sooner."""
    page_hashes: bytes
    """16 bytes for each full page of the prompt, chained; empty where the frontend leaves them out."""
    payload: list[Frame]


@message(5)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work(Message):
    """The payload of Submit: everything needed to run a shard, from the start or on from `outputs`."""

    params: SamplingParams
    samples: list[int]
    """Indices of the samples to run (those of the shard that are not finished)."""
    output_counts: list[int]
    """For each of `samples`, how many ids it already has."""
    delivery: int = 1
    """Tokens of a sample that are sent together, unless it ends before: 1 where somebody waits for each of them."""
    prompt: Int32
    outputs: Int32
    """The ids that the samples already have, one sample after another; empty at first."""


@message(6)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accepted(Message):
    """Broker to frontend: the shard is queued or dispatched."""

    request: bytes
    first_sample: int


@message(7)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refused(Message):
    """To the frontend, from the broker (the queue is full, draining) or the manager.

    The manager refuses what can never run (400), and what it is asked to resume and does not have (503; then
    `first_sample` is the sample asked for, and the broker fills in the shard's own, and the frontend).
    """

    frontend: bytes
    request: bytes
    first_sample: int
    sequences: int
    status: int
    """An HTTP status: 429, 503, 400 or 500."""
    reason: str
    retry_after: int
    """Seconds; 0 where a retry does not help."""


@message(8)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cancel(Message):
    """Frontend to manager: drop these samples; nothing more is wanted of them."""

    request: bytes
    samples: list[int]
    """Empty: the whole request."""


@message(9)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lost(Message):
    """Broker to frontend: the replica that held these shards is gone; submit again what is unfinished."""

    requests: list[bytes]
    first_samples: list[int]


@message(10)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resume(Message):
    """Frontend to manager: tokens from position `have` on did not arrive; send them again."""

    request: bytes
    sample: int
    have: int
    scored: int = 0
    """The same for log-probabilities of the prompt: so many are here."""


@message(11)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release(Message):
    """Frontend to manager: these requests are complete here; forget their tokens."""

    requests: list[bytes]


@message(12)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outputs(Message):
    """Manager to broker, onward to one frontend: all that a step has for it. `payload`: `Tokens`, or `Scores`."""

    frontend: bytes
    epoch: int
    finished: list[bytes]
    """Request id of each shard that lost sequences in this message ..."""
    finished_first: list[int]
    finished_sequences: list[int]
    """... and how many sequences of it ended: the credits that come back."""
    payload: list[Frame]


@message(13)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens(Message):
    """The payload of Outputs: rows of (request, sample), each with a run of new tokens.

    Log-probabilities stand only for rows with `logprobs >= 0`, in row order: one `chosen` for each token
    and `logprobs` pairs of `top_ids` and `top_values` for each token.
    """

    requests: bytes
    """16 bytes a row."""
    samples: Int32
    first: Int32
    """Position, in the sample's output, of the row's first token."""
    counts: Int32
    finish: Uint8
    """A Finish for each row."""
    cached: Int32
    """Prompt tokens found in the prefix cache; set on every row."""
    logprobs: Int32
    """-1: none; 0: chosen only; k: k most likely as well."""
    tokens: Int32
    chosen: Float32
    top_ids: Int32
    top_values: Float32


@message(14)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ping(Message):
    """Broker to manager, answered with Pong from the scheduling loop itself."""

    nonce: int
    frontend: bytes
    """Whoever asked (a health check); empty for the broker's own."""


@message(15)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pong(Message):
    nonce: int
    frontend: bytes
    epoch: int
    running: int
    waiting: int
    pages_used: int
    pages: int


@message(16)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fenced(Message):
    """Broker to manager: your epoch is over (declared dead, or another took your name); drop all, join anew."""

    epoch: int


@message(17)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages(Message):
    """Manager to broker, after a join and then a few times a second: which pages of prompts the replica has cached.

    Keys as in Submit's `page_hashes`.
    """

    whole: bool
    """Whether `inserted` is all that it has."""
    inserted: bytes
    """16 bytes for each page, parents before children."""
    evicted: bytes


@message(18)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores(Message):
    """A payload of Outputs: rows of log-probabilities of a request's prompt. It comes before tokens of the request's
    first shard.

    A row is a run of ids: one `chosen` for each, and `logprobs` pairs of `top_ids` and `top_values`.
    """

    requests: bytes
    """16 bytes a row."""
    first: Int32
    """The place of the row's first id; 0 is the prompt's second, the first that anything stands before."""
    counts: Int32
    logprobs: Int32
    """0: chosen only; k: k most likely as well."""
    chosen: Float32
    top_ids: Int32
    top_values: Float32


# --- Manager and stages -------------------------------------------------------------------------------


@message(32)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageReady(Message):
    """Stage to manager, once: weights are loaded and the largest batch has been proved to fit."""

    stage: int
    pages: int
    """KV pages the stage has room for, its scratch page not counted."""
    max_seqs: int
    max_tokens_per_step: int
    inbox: str = ""
    """Where other stages reach this one; empty: nowhere, it is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotExtras:
    """What few requests need of a slot, beside the arrays of a Plan."""

    slot: int
    logit_bias: dict[int, float]
    banned_ids: list[int]
    """Ids that may not be sampled before `min_tokens`."""
    penalised: bool
    """Whether `prompt` and `outputs` are given for the penalties' counts."""
    prompt: bytes
    """int32 ids."""
    outputs: bytes
    """int32 ids the sample already has."""
    constrained: bool = False
    """Whether its samples wait for masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A row of a prompt of which each id that follows one of its tokens is given its log-probability."""

    row: int
    likely: int
    """How many of the most likely ids are named with each."""
    following: int
    """The id that follows the row's last token; -1: none does."""


@message(33)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(Message):
    """Manager to every stage: one step. A stage executes plans in the order they were sent.

    A *row* is one sequence's tokens in this step. Order of execution: slot set-up, page table entries,
    page copies, forward pass, sampling, scoring.
    """

    step: int
    after: int
    """The step whose sampled ids this one needs: the last that sampled for a slot whose row says -1; 0: none."""
    # Slots taken over by a new sequence. setup_floats: [n, 6] temperature, top_p, min_p, presence,
    # frequency, repetition; setup_ints: [n, 4] top_k, min_tokens, logprobs, sample; setup_seeds: [n],
    # the 64 bits of the seed.
    setup_slots: Int32
    setup_floats: Float32
    setup_ints: Int32
    setup_seeds: Int64
    extras: list[SlotExtras]
    # Page tables: table[slot, index] = page.
    table_slots: Int32
    table_indices: Int32
    table_pages: Int32
    copies: Int32
    """[n, 2]: copy KV page (source, target), before the forward pass."""
    row_slots: Int32
    row_starts: Int32
    """Position of the row's first token in its sequence: so many tokens are in the KV cache already."""
    row_counts: Int32
    """Tokens of the row in this step; decode rows have one."""
    tokens: Int32
    """The rows' token ids, one row after another; -1: the id last sampled in the row's slot."""
    # Sampling: logits of the last token of row `sample_rows[i]` give the next token of slot
    # `sample_slots[i]`, output number `sample_positions[i]` (0 is the first). Several slots may sample
    # from one row.
    sample_rows: Int32
    sample_slots: Int32
    sample_positions: Int32
    scores: list[ScoredRow] = field(default_factory=list)
    """In the order of their rows."""
    # Shared-prefix groups: group g's prefix is the next `group_page_counts[g]` of `group_pages`, its
    # members the next `group_row_counts[g]` of `group_rows` (row numbers). The prefix is whole pages and
    # stands at the start of every member's page table.
    group_pages: Int32
    group_page_counts: Int32
    group_rows: Int32
    group_row_counts: Int32


@message(34)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult(Message):
    """First rank of the last stage to manager: what a plan's `sample_*` rows drew and its `scores` are, in their
    order."""

    step: int
    busy_us: int
    tokens: Int32
    # Only for samples whose slot asked for log-probabilities, in order; top_*: that slot's k each.
    chosen: Float32
    top_ids: Int32
    top_values: Float32
    # The same for the ids that follow tokens of scored rows; top_*: that row's `likely` each.
    scored: Float32 = field(default_factory=no_floats)
    scored_top_ids: Int32 = field(default_factory=no_ints)
    scored_top_values: Float32 = field(default_factory=no_floats)


@message(35)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stop(Message):
    """Manager to stages: no plan follows; end with status 0."""


@message(36)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peers(Message):
    """Manager to stages of a pipeline, once, before the first plan."""

    inboxes: list[str]
    """Of every stage, by its number."""


@message(37)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activations(Message):
    """Stage to the next one: hidden states of a plan's tokens, [tokens, hidden], in the dtype both compute in."""

    step: int
    payload: list[Frame]


@message(38)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled(Message):
    """Last stage to the first: what a plan drew, in the order of its `sample_slots`.

    Also to the matcher: what it drew for the slots of the step's Constrain, in their order.
    """

    step: int
    slots: Int32
    tokens: Int32


@message(39)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLoad(Message):
    """Stage to manager, about once a second: which share of the time since the last one it computed."""

    stage: int
    busy: float


@message(40)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageHello(Message):
    """Stage to manager, before it loads anything, where it is not alone; again until it is answered."""

    stage: int
    settings: dict[str, str]
    """What it must have in common with the manager, where they are on several hosts."""


@message(41)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meet(Message):
    """Manager to stage, in answer to its hello: what the stages find each other by."""

    token: str
    """Of this start of the replica."""
    refusal: str = ""
    """Why the stage cannot take part, in a sentence."""


# --- The matcher, with manager and last stage ---------------------------------------------------------


@message(48)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compile(Message):
    """Manager to matcher, before anything that has this grammar is admitted."""

    number: int
    grammar: str


@message(49)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled(Message):
    """Matcher to manager: the grammar of this number is ready."""

    number: int
    error: str
    """Why it is not, in a sentence; empty where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSetup:
    """A slot taken over by a sequence with a grammar; see SamplingParams."""

    slot: int
    grammar: int
    """Which of Constrain's `grammars`."""
    grammar_after: int
    banned_ids: list[int]
    """Ids that may not be sampled before `min_tokens`, unless the grammar allows no other."""
    min_tokens: int
    outputs: bytes
    """int32 ids the sample already has."""


@message(50)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constrain(Message):
    """Manager to matcher, with every plan that samples for slots with a grammar, or sets one up.

    `slots` and `positions` are those of the plan's `sample_slots` and `sample_positions`, in their order.
    """

    step: int
    grammars: list[str]
    setups: list[GrammarSetup]
    slots: Int32
    positions: Int32


@message(51)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masks(Message):
    """Matcher to every rank of the last stage: which ids the slots of a step's Constrain may be given.

    bits: [slots, 4 * ceil(vocabulary / 32)]; of a row, bit i % 8 of byte i // 8 is for id i.
    """

    step: int
    bits: Uint8


@message(52)
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GrammarFailed(Message):
    """Matcher to manager: the grammar of what is in this slot cannot be followed any further. The manager sends it
    back when it has ended the sequence; until then the matcher keeps the masks of its next step."""

    slot: int
    reason: str
