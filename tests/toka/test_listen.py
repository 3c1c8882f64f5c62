"""Listening sockets: for several processes, of a host of several addresses, and where the port is taken."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from toka.listen import LISTEN_FDS, address, inherited, listen, listen_privately


def accepted(listening: socket.socket) -> int:
    listening.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            count += 1
    return count


def test_connections_spread_over_the_processes():
    sets = listen("127.0.0.1", 0, 4)
    (port,) = {each.getsockname()[1] for [each] in sets}
    with contextlib.ExitStack() as clients:
        for _ in range(200):
            clients.enter_context(socket.create_connection(("127.0.0.1", port)))
        counts = [accepted(each) for [each] in sets]
    assert sum(counts) == 200 and min(counts) > 20
    for [each] in sets:
        each.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_is_shared_is_taken_all_the_same(processes: int):
    sets = listen("127.0.0.1", 0, 2)
    port = sets[0][0].getsockname()[1]
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        listen("127.0.0.1", port, processes)
    for [each] in sets:
        each.close()


def test_a_host_that_is_not_there():
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign"):
        listen("192.0.2.1", 0)


def test_a_name_is_listened_to_at_all_its_addresses(monkeypatch: pytest.MonkeyPatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (own,) = listen("name", 0)
    names = [each.getsockname() for each in own]
    assert names == [("127.0.0.1", names[0][1]), ("127.0.0.2", names[0][1])]
    for each in own:
        each.close()


@pytest.fixture
def no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel without IPv6: getaddrinfo gives its addresses all the same."""
    real, both = socket.socket.__init__, [(socket.AF_INET6, ("::", 0, 0, 0)), (socket.AF_INET, ("0.0.0.0", 0))]

    def create(self: socket.socket, family: int = -1, *rest: Any, **more: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        real(self, family, *rest, **more)

    monkeypatch.setattr(socket.socket, "__init__", create)
    found = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in both]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: found[: 1 if host else 2])


@pytest.mark.usefixtures("no_ipv6")
def test_a_kernel_without_ipv6_listens_at_its_other_addresses():
    sets = listen("", 0, 2)
    ports = {each.getsockname()[1] for own in sets for each in own}
    assert [[each.family for each in own] for own in sets] == [[socket.AF_INET]] * 2 and len(ports) == 1
    for [each] in sets:
        each.close()
    with pytest.raises(ValueError, match="cannot listen on ::1:0: Address family not supported"):
        listen("::1", 0)


def test_an_address_of_a_name_that_this_machine_does_not_have_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (own,) = listen("name", 0)
    assert [each.getsockname()[0] for each in own] == ["127.0.0.1"]
    own[0].close()


def test_what_is_inherited_is_taken_once(monkeypatch: pytest.MonkeyPatch):
    ((mine,),) = listen("127.0.0.1", 0)
    monkeypatch.setenv(LISTEN_FDS, str(os.dup(mine.fileno())))
    (own,) = inherited()
    assert own.getsockname() == mine.getsockname() and not own.get_inheritable()
    assert not inherited()
    own.close()
    mine.close()


def test_each_process_has_a_file_of_its_own_in_a_private_folder(tmp_path: Path):
    for _ in range(2):  # What a process has left that was killed is in nobody's way.
        sets = listen_privately(tmp_path, 2)
        for number, [each] in enumerate(sets):
            assert address(each, "") == f"unix:{tmp_path}/http-{number}"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / f"http-{number}"))
                assert accepted(each) == 1
            each.close()


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_an_address_is_a_url(host: str, url: str):
    with contextlib.suppress(ValueError):  # IPv6 may be off.
        [[each]] = listen(host, 0)
        assert address(each, host) == f"{url}{each.getsockname()[1]}"
        each.close()
