"""Two hosts on one machine: network namespaces with a cable between them. Needs iproute2 and root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.needs import lacks, needs

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """`ipv4` and `ipv6` are its addresses on the cable; 127.0.0.1 is another one on each host."""

    name: str
    ipv4: str
    ipv6: str

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is there meanwhile; processes, threads and sockets that it starts remain there."""
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(Path("/run/netns", self.name), os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(back)
            os.close(there)
            os.close(back)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Gone at the end, whatever happens. Skips the test where there can be none."""
    needs("ip")
    first, second = (Host(f"toka-{os.getpid()}-{n}", f"10.77.0.{n}", f"fd77::{n}") for n in (1, 2))
    with contextlib.ExitStack() as made:
        for host in (first, second):
            added = _ip("netns", "add", host.name)
            if added.returncode:
                lacks(f"network namespaces cannot be made ({added.stderr.strip()})")
            made.callback(_ip, "netns", "delete", host.name)
        _do("link", "add", "cable", "netns", first.name, "type", "veth", "peer", "name", "cable", "netns", second.name)
        for host in (first, second):
            _do("-n", host.name, "address", "add", f"{host.ipv4}/24", "dev", "cable")
            _do("-n", host.name, "address", "add", f"{host.ipv6}/64", "dev", "cable", "nodad")
            for link in ("cable", "lo"):
                _do("-n", host.name, "link", "set", link, "up")
        yield first, second


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _do(*args: str) -> None:
    done = _ip(*args)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"


def _ip(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *args], capture_output=True, text=True, timeout=10)
