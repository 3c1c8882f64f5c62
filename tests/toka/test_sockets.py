"""Addresses, and a socket within asyncio."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from toka.messages import Cancel, Release, encode
from toka.sockets import IPC_PATH_BYTES, Port, check_endpoint, open_socket, parse, send, unlink, worker_endpoint


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "endpoint", ["ipc:///run/toka/broker", "tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555"]
)
def test_safe_addresses(endpoint: str):
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:5555", "tcp://10.1.2.3:5555", "tcp://gpu-7.example.org:5555", "tcp://eth0:5555", "tcp://*:5555",
     "tcp://[fd77::1]:5555", "tcp://[fe80::1%eth0]:5555"],
)  # fmt: skip
def test_addresses_that_are_safe_with_keys_alone(endpoint: str):
    assert check_endpoint(endpoint, "keys") == endpoint
    with pytest.raises(ValueError, match="tcp without keys is refused unless the address is loopback"):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    ["", "broker", "ipc://", "ipc://" + "x" * IPC_PATH_BYTES, "tcp://127.0.0.1", "tcp://:5", "udp://127.0.0.1:5",
     "tcp://127.0.0.1:0", "tcp://127.0.0.1:65535", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:5/x", "tcp://a@b:5",
     "tcp://[::1:5", "tcp://::1:5", "tcp://[]:5"],
)  # fmt: skip
def test_broken_addresses_are_refused(endpoint: str):
    with pytest.raises(ValueError, match=re.escape(f"{endpoint}: ")):
        check_endpoint(endpoint, "keys")


def test_workers_have_an_address_of_their_own():
    assert worker_endpoint("ipc:///run/b") == "ipc:///run/b.workers"
    assert worker_endpoint("tcp://127.0.0.1:70") == "tcp://127.0.0.1:71"
    assert worker_endpoint("tcp://[::1]:70") == "tcp://[::1]:71"


def test_unlink_removes_a_socket_file_and_minds_no_other(tmp_path: Path):
    (tmp_path / "b").touch()
    unlink(f"ipc://{tmp_path}/b")
    unlink(f"ipc://{tmp_path}/b")
    unlink("tcp://127.0.0.1:1")
    assert not (tmp_path / "b").exists()


def pair(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    router, dealer = open_socket(context, zmq.ROUTER), open_socket(context, zmq.DEALER, b"peer")
    router.bind(f"ipc://{path}/s")
    dealer.connect(f"ipc://{path}/s")
    return router, dealer


def test_a_send_to_nobody_says_so(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path):
    router, dealer = pair(context, tmp_path)
    assert not send(router, Release(requests=[]), [b"nobody"])
    dealer.send(b"here")
    router.recv_multipart()
    assert send(router, Release(requests=[]), [b"peer"])


def test_what_is_no_message_is_none():
    assert parse([b"junk"]) is None
    assert isinstance(parse(encode(Release(requests=[]))), Release)


async def test_a_port_misses_nothing_while_both_sides_send(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path):
    router, dealer = pair(context, tmp_path)
    there, here = Port(router), Port(dealer)
    count, received = 3000, 0

    async def echo() -> None:
        async for identity, *frames in there.messages():
            there.send_frames([identity, *frames])

    echoing = asyncio.create_task(echo())
    began = asyncio.get_running_loop().time()
    for number in range(count):
        here.send(Cancel(request=number.to_bytes(16, "little"), samples=[]))
    async for frames in here.messages():
        message = parse(frames)
        assert isinstance(message, Cancel) and int.from_bytes(message.request, "little") == received
        received += 1
        if received == count:
            break
    echoing.cancel()
    assert asyncio.get_running_loop().time() - began < 5.0


async def test_a_large_message_arrives_whole(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path):
    router, dealer = pair(context, tmp_path)
    blob = bytes(range(256)) * 40_000
    Port(dealer).send_frames([blob, b"end"])
    async for _, *frames in Port(router).messages():
        assert frames == [blob, b"end"]
        break


async def test_a_reader_is_cancelled_even_as_something_is_sent(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path):
    router, _ = pair(context, tmp_path)
    port = Port(router)

    async def read() -> None:
        async for _ in port.messages():
            pass

    for _ in range(20):
        reader = asyncio.create_task(read())
        await asyncio.sleep(0.001)
        port.send(Release(requests=[]), [b"nobody"])
        reader.cancel()
        done, _ = await asyncio.wait([reader], timeout=0.5)
        assert done, "the cancellation was swallowed"
