"""When events of a GPU happened, in time of the host."""

from __future__ import annotations

import time

import torch

REBASE_MS = 4000.0
"""Times between events come as 32-bit floats: near to the base they are exact to less than a microsecond."""


class DeviceClock:
    """Begins with the stream empty: its first event is taken to happen when the host has seen it.

    That is late by what the host takes to notice, some 10 us; later times are late by as much. Clocks of host and
    device are not matched again: they part by a few us each second.
    """

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._base.record()
        self._base.synchronize()
        self._at = time.perf_counter_ns()

    def at(self, event: torch.cuda.Event) -> int:
        """When `event`, which has happened, did: ns of time.perf_counter_ns. Ask in the order of events."""
        since_ms: float = self._base.elapsed_time(event)
        at = self._at + round(since_ms * 1e6)
        if since_ms > REBASE_MS:
            self._base, self._at = event, at
        return at
