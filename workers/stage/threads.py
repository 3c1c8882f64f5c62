"""How a stage uses the CPU's cores, which it shares with the server's other processes."""

from __future__ import annotations

import os

SPIN_COUNT = 1000
"""How often a thread that waits for the others looks again before it sleeps: for some 50 microseconds."""


def before_torch() -> None:
    """Call before torch is imported: its OpenMP reads the environment once.

    A thread that spins keeps its core from the process that delays the others: with two threads on two
    cores that other processes wanted as well, a decode step took six times as long as with one thread, and more. Not
    to spin at all lets threads sleep between the operations of a step, which costs a quarter of it.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def configure(threads: int) -> None:
    """Take `threads` threads (0: one for each core this process may use); treat denormal numbers as zero."""
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.set_flush_denormal(True)
