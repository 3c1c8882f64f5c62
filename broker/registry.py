"""Who is there, frontends and replicas, and which shard is whose."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker.prefixes import Prefixes
from toka.messages import Frame, ModelCard
from toka.page_keys import split

FENCED_KEPT = 4096
"""Epochs of dead replicas that are remembered; a process this old that still speaks is a new peer."""

Key = tuple[bytes, int]
"""A shard's name: request id and first sample."""


@dataclass(slots=True, eq=False)
class Shard:
    """A range of samples of a request, waiting in the queue or held by a replica."""

    request: bytes
    first: int
    frontend: Frontend
    sequences: int
    """Those that have not ended."""
    priority: int = 0
    frames: Sequence[Frame] = ()
    """The Submit as it came, while the shard waits; a replica that has it needs it here no more."""
    page_hashes: bytes = b""
    """Keys of the prompt's full pages, while the shard waits."""
    replica: Replica | None = None
    cancelled: list[int] = field(default_factory=list)
    """Samples that were cancelled while the shard waited."""
    _keys: list[bytes] | None = None

    @property
    def key(self) -> Key:
        return (self.request, self.first)

    def keys(self) -> list[bytes]:
        """`page_hashes`, one by one."""
        if self._keys is None:
            # Only now: thousands of shards wait, and this takes far more memory.
            self._keys = split(self.page_hashes)
        return self._keys

    def leave_queue(self) -> None:
        """What only a waiting shard needs."""
        self.frames, self.page_hashes, self._keys = (), b"", None


@dataclass(slots=True, eq=False)
class Frontend:
    identity: bytes
    seen: float
    """When something last came from it, in seconds of the monotonic clock."""
    joined: bool = False
    """False while it is known only from what replicas hold or from a Submit that overtook its join."""
    shards: dict[Shard, None] = field(default_factory=dict)
    """In the order they came."""
    unmatched: dict[bytes, set[int]] = field(default_factory=dict)
    """Shards (first samples by request) it waits for and no replica is known to hold."""


@dataclass(slots=True, eq=False)
class Replica:
    identity: bytes
    name: str
    epoch: int
    credits: int
    card: ModelCard
    seen: float
    """When something last came from it, in seconds of the monotonic clock."""
    answered: bool = False
    """Whether it has answered a ping."""
    reachable: bool = True
    """False from a send that failed until something comes from it."""
    used: int = 0
    """Sequences that it has and that have not ended, ..."""
    by_priority: Counter[int] = field(default_factory=Counter)
    """... and how many there are of each priority."""
    shards: dict[Shard, None] = field(default_factory=dict)
    """In the order they were given."""
    prefixes: Prefixes = field(init=False)

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(self.card.kv_cache_tokens // self.card.page_size)

    def count(self, priority: int, sequences: int) -> None:
        """It has so many sequences more of this priority; fewer where negative."""
        self.used += sequences
        self.by_priority[priority] += sequences
        if not self.by_priority[priority]:
            del self.by_priority[priority]

    def as_urgent(self, priority: int) -> int:
        """Sequences that it has of this priority or a more urgent one."""
        return sum(count for each, count in self.by_priority.items() if each <= priority)

    @property
    def slots(self) -> int:
        """Sequences it runs at once: it grants as many credits again for those that wait."""
        return max(1, self.credits // 2)

    @property
    def open(self) -> bool:
        """Whether it may be given work (one that drains grants no credits)."""
        return self.reachable and self.credits > 0


class Registry:
    """All frontends, replicas and shards; keeps their references to one another consistent."""

    def __init__(self) -> None:
        self.frontends: dict[bytes, Frontend] = {}
        self.replicas: dict[bytes, Replica] = {}
        self._shards: dict[bytes, dict[int, Shard]] = {}
        self._fenced: OrderedDict[bytes, int] = OrderedDict()
        self._strangers: set[bytes] = set()

    def __len__(self) -> int:
        """Shards there are."""
        return sum(len(each.shards) for each in self.frontends.values())

    def frontend(self, identity: bytes, now: float) -> Frontend:
        """The frontend of this identity, which is new if it was unknown."""
        return self.frontends.setdefault(identity, Frontend(identity, now))

    def shard(self, request: bytes, first: int) -> Shard | None:
        return self._shards.get(request, {}).get(first)

    def holding(self, request: bytes, sample: int) -> Shard | None:
        """The shard of `request` in whose range `sample` is."""
        shards = self._shards.get(request, {}).values()
        return max((s for s in shards if s.first <= sample), key=lambda s: s.first, default=None)

    def shards_of(self, request: bytes, frontend: Frontend) -> list[Shard]:
        """The shards of a request, where it is one of this frontend's."""
        return [shard for shard in self._shards.get(request, {}).values() if shard.frontend is frontend]

    def add(self, shard: Shard) -> None:
        of_request = self._shards.setdefault(shard.request, {})
        assert shard.first not in of_request, "a shard is added once"
        of_request[shard.first] = shard
        shard.frontend.shards[shard] = None

    def give(self, shard: Shard, replica: Replica) -> None:
        """The shard is the replica's from now on and takes its credits; its prompt's pages will be there."""
        assert shard.replica is None
        replica.prefixes.add(shard.keys())
        shard.leave_queue()
        shard.replica = replica
        replica.shards[shard] = None
        replica.count(shard.priority, shard.sequences)

    def finish(self, shard: Shard, sequences: int) -> None:
        """So many sequences of a replica's shard have ended: their credits come back."""
        ended = min(sequences, shard.sequences)
        shard.sequences -= ended
        if shard.replica is not None:
            shard.replica.count(shard.priority, -ended)

    def forget(self, shard: Shard) -> None:
        of_request = self._shards[shard.request]
        del of_request[shard.first]
        if not of_request:
            del self._shards[shard.request]
        del shard.frontend.shards[shard]
        if shard.replica is not None:
            del shard.replica.shards[shard]
            shard.replica.count(shard.priority, -shard.sequences)

    def fence(self, replica: Replica) -> None:
        """The replica's epoch is over, for good."""
        del self.replicas[replica.identity]
        self._fenced[replica.identity] = replica.epoch
        if len(self._fenced) > FENCED_KEPT:
            self._fenced.popitem(last=False)

    def fenced_epoch(self, identity: bytes) -> int | None:
        return self._fenced.get(identity)

    def named(self, name: str) -> Replica | None:
        return next((each for each in self.replicas.values() if each.name == name), None)

    def welcomes(self, card: ModelCard) -> bool:
        """Whether a replica of this card serves the same model as those there are."""
        present = self.card()
        return present is None or (present.name, present.vocab_size) == (card.name, card.vocab_size)

    def note_stranger(self, identity: bytes) -> bool:
        """Whether this is the first time that a replica of another model came by this identity."""
        new = identity not in self._strangers
        self._strangers.add(identity)
        return new

    def share(self) -> int:
        """Sequences of one prompt that a replica should get together: no more than any of them runs at once.

        0 where there are no others that could take the rest.
        """
        slots = [each.slots for each in self.replicas.values() if each.open]
        return min(slots) if len(slots) > 1 else 0

    def card(self) -> ModelCard | None:
        """What every replica can serve: the narrowest of their limits. None without replicas."""
        cards = [each.card for each in self.replicas.values()]
        return _narrowest(cards) if cards else None


def _narrowest(cards: Iterable[ModelCard]) -> ModelCard:
    first, *rest = cards
    return dataclasses.replace(
        first,
        context_length=min([first.context_length, *(each.context_length for each in rest)]),
        kv_cache_tokens=min([first.kv_cache_tokens, *(each.kv_cache_tokens for each in rest)]),
        max_logprobs=min([first.max_logprobs, *(each.max_logprobs for each in rest)]),
    )
