"""Prefix pages that a running sequence is about to fill, and the sequences that wait for them."""

from __future__ import annotations

from workers.manager.sequences import Sequence


class Promises:
    """Who computes which page key next, and who is parked until it has.

    A parked sequence would compute the same page again if it were admitted now. It is handed back when the
    page's plan has been sent, or when the promise is broken: then it may take over.
    """

    def __init__(self) -> None:
        self._by: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, list[Sequence]] = {}

    def promise(self, keys: list[bytes], sequence: Sequence) -> None:
        for key in keys:
            self._by.setdefault(key, sequence)

    def park(self, entry: Sequence, found: int) -> bool:
        """Whether the page behind the first `found` of `entry` is promised: then it is parked until the last page
        that is promised from there on has been sent. Nobody waits for one that is less urgent."""
        at = found
        while at < len(entry.keys) and self._promised(entry.keys[at], entry.shard.priority):
            at += 1
        if at > found:
            self._parked.setdefault(entry.keys[at - 1], []).append(entry)
        return at > found

    def _promised(self, key: bytes, priority: int) -> bool:
        by = self._by.get(key)
        return by is not None and by.shard.priority <= priority

    def settle(self, keys: list[bytes], sequence: Sequence) -> list[Sequence]:
        """End what `sequence` promised of `keys` (kept or broken); the entries parked on them, in order."""
        freed: list[Sequence] = []
        for key in keys:
            if self._by.get(key) is sequence:
                del self._by[key]
                freed += self._parked.pop(key, [])
        return freed
