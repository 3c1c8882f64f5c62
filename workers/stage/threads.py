"""How a stage uses the CPU's cores, which it shares with the server's other processes, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os

SPIN_COUNT = 10_000
"""How often a thread that waits for the others looks again before it sleeps: for some 0.5 ms."""

_MALLOC_OPTIONS = {-1: 1 << 30, -3: 32 << 20}
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, the latter at its most."""


_SEVERAL = {
    # A stream that waits for another stage holds up those that share its queue to the GPU; by default there are 8.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A receive that waits keeps a multiprocessor for each channel, and a step's hidden states need few.
    "NCCL_MAX_P2P_NCHANNELS": "2",
    # Or peers hold on to the memory of graphs that are gone.
    "NCCL_GRAPH_REGISTER": "0",
}


def before_torch(several: bool = False) -> None:
    """Call before torch is imported: its OpenMP reads the environment once. several: the replica has other stages.

    Threads that sleep between the operations of a step take longer to wake than an operation takes; threads
    that spin keep their core from the process that delays the others. Decode steps of 16 rows on two cores, in ms:

    | spin count | 1000 | 4000 | 7000 | 10000 | 20000 | 30000 |
    |---|---|---|---|---|---|---|
    | idle machine | 73 | 60 | 56 | 55 | 55-58 | 55 |
    | beside one busy process | 107 | 130 | 153 | 172 | 221 | 262 |
    """
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    for name, value in _SEVERAL.items() if several else ():
        os.environ.setdefault(name, value)


def configure(threads: int) -> None:
    """Take `threads` threads (0: one for each core this process may use); treat denormal numbers as zero."""
    import torch

    _keep_memory()
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.set_flush_denormal(True)


def _keep_memory() -> None:
    """Have glibc keep what a step frees for the next one: a page fault for every 4 KiB is a tenth of a long step."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)
