"""Keys: files that toka-keygen makes, and who is admitted over tcp, by a real broker."""

from __future__ import annotations

import logging
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from zmq.auth import load_certificate

from tests.support.broker import CARD
from tests.support.harness import Harness
from tests.support.namespaces import two_hosts
from tests.support.server import ROOT, Running, free_port, running, until
from toka.keygen import add_client, make_keys
from toka.keys import Whitelist, client_keys, protect_server, public_key, server_pair
from toka.messages import JoinFrontend, State
from toka.sockets import Connection, check_endpoint, open_socket, parse, receive, send, worker_endpoint
from workers.manager.uplink import Uplink

NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""What a peer without keys says first (ZMTP 3.1)."""
NO_HANDSHAKE = "one side has no keys, or server.key is not the broker's own"
NOT_ADMITTED = "the public key of client.key_secret is not among those that it admits"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


class Client:
    """What a frontend does until it has met the broker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: Path | str = "") -> None:
        self.endpoint = endpoint
        self.connection = Connection(context, endpoint, b"f-1", str(keys))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.socket.setsockopt(zmq.LINGER, 0)
        self.connection.close()

    def meets(self) -> bool:
        """Whether the broker answers within a moment."""
        self.connection.keep()
        send(self.connection.socket, JoinFrontend(holds=[], holds_first=[]))
        return bool(self.connection.socket.poll(50)) and isinstance(parse(receive(self.connection.socket) or []), State)


def refused(client: Client, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The client says in a moment that it is refused, why and by whom; says it once; and is refused still."""

    def said() -> list[logging.LogRecord]:
        assert not client.meets()
        return [each for each in caplog.records if each.message == "the broker refused the connection"]

    until(lambda: bool(said()), 5, "a warning")
    for _ in range(10):
        said()
    (record,) = said()
    assert (record.endpoint, record.reason) == (client.endpoint, reason)  # type: ignore[attr-defined]
    assert record.levelno == logging.WARNING


# --- Files --------------------------------------------------------------------------------------------


def keygen(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "toka.keygen", *map(str, args)],
        capture_output=True, text=True, timeout=30, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def modes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): stat.filemode(path.stat().st_mode) for path in folder.rglob("*")}


def test_keygen_makes_a_private_folder_and_overwrites_nothing(tmp_path: Path):
    folder = tmp_path / "keys"
    made = keygen(folder)
    assert made.returncode == 0 and f"{folder}/server.key_secret" in made.stdout, made
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first = {
        "server.key": "-rw-r--r--",
        "server.key_secret": "-rw-------",
        "client.key_secret": "-rw-------",
        "clients": "drwx------",
        "clients/client.key": "-rw-r--r--",
    }
    assert modes(folder) == first
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = keygen(folder)
    assert again.returncode == 1 and again.stderr.count("\n") == 1 and f"{folder}/server.key_secret" in again.stderr
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    more = keygen(folder, "rack-2")
    assert more.returncode == 0 and f"{folder}/rack-2" in more.stdout, more
    assert modes(folder) == first | {
        "rack-2": "drwx------",
        "rack-2/server.key": "-rw-r--r--",
        "rack-2/client.key_secret": "-rw-------",
        "clients/rack-2.key": "-rw-r--r--",
    }
    again = keygen(folder, "rack-2")
    assert again.returncode == 1 and f"{folder}/rack-2/client.key_secret is there already" in again.stderr


def test_keys_are_those_of_other_zeromq_programs_and_belong_together(keys: Path):
    add_client(keys, "second")
    server, client, second = server_pair(str(keys)), client_keys(str(keys)), client_keys(str(keys / "second"))
    assert client.server == second.server == server.public == public_key(keys / "server.key")
    assert client.own.public == public_key(keys / "clients" / "client.key")
    assert second.own.public == public_key(keys / "clients" / "second.key")
    assert len({server.secret, client.own.secret, second.own.secret}) == 3
    assert load_certificate(keys / "server.key_secret") == (server.public, server.secret)
    assert load_certificate(keys / "server.key") == (server.public, None)


@pytest.mark.parametrize("args", [(), ("a", "b", "c"), ("--make",)])
def test_keygen_tells_how_it_is_used(args: tuple[str, ...]):
    assert keygen("--help").stdout.startswith("toka-keygen: keys for a broker")
    wrong = keygen(*args)
    assert wrong.returncode == 2 and "usage: toka-keygen DIR" in wrong.stderr


def test_keygen_refuses_in_one_sentence(tmp_path: Path):
    for name in ("clients", "../up", ""):
        with pytest.raises(ValueError, match=r"expected a name of letters, digits, - and _"):
            add_client(tmp_path / "keys", name)
    with pytest.raises(ValueError, match=r"cannot read .*/keys/server\.key: No such file"):
        add_client(tmp_path / "keys", "worker")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"/file: File exists"):
        make_keys(tmp_path / "file")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match=r"open must be yours and private"):
        make_keys(tmp_path / "open")


def test_a_bad_key_file_is_named(keys: Path):
    secret, public = keys / "client.key_secret", keys / "server.key"
    good = secret.read_text()
    for mode in (0o640, 0o604):
        secret.chmod(mode)
        with pytest.raises(ValueError, match=r"client\.key_secret must be for you alone \(chmod 600\)"):
            client_keys(str(keys))
    secret.chmod(0o600)
    secret.write_text(good.replace(public_key(secret).decode(), public_key(public).decode()))
    with pytest.raises(ValueError, match=r"two keys in .*client\.key_secret do not belong together"):
        client_keys(str(keys))
    secret.write_text(good.replace("secret-key", "key"))
    with pytest.raises(ValueError, match=r"client\.key_secret has no secret key"):
        client_keys(str(keys))
    secret.write_text(good)
    for text in ("", 'public-key = "short"', 'public-key = "' + "#" * 40 + '"', "\0\xff"):
        public.write_text(text)
        with pytest.raises(ValueError, match=r"server\.key has no public key"):
            client_keys(str(keys))
    public.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*server\.key: No such file"):
        client_keys(str(keys))


def test_the_whitelist_is_what_lies_in_the_folder(keys: Path, caplog: pytest.LogCaptureFixture):
    whitelist = Whitelist(str(keys))
    first = public_key(keys / "clients" / "client.key")
    assert whitelist.admits(first) and not whitelist.admits(server_pair(str(keys)).public)
    add_client(keys, "second")
    second = public_key(keys / "clients" / "second.key")
    assert whitelist.admits(second)
    (keys / "clients" / "half.key").write_text("public-key = ")
    assert whitelist.admits(first) and whitelist.admits(second) and "half.key has no public key" in caplog.text
    (keys / "clients" / "client.key").unlink()
    assert not whitelist.admits(first) and whitelist.admits(second)
    with pytest.raises(ValueError, match=r"half\.key has no public key"):
        Whitelist(str(keys))
    shutil.rmtree(keys / "clients")
    assert not whitelist.admits(second)
    with pytest.raises(ValueError, match=r"keys/clients is not a folder"):
        Whitelist(str(keys))


# --- Who is admitted ----------------------------------------------------------------------------------


def test_with_the_right_keys_frontends_and_managers_meet_the_broker(
    keys: Path, endpoint: str, context: zmq.Context[zmq.Socket[bytes]]
):
    uplink = Uplink(context, worker_endpoint(endpoint), "r0", CARD, Harness().scheduler.state, str(keys))
    with Client(context, endpoint, keys) as client, running("broker", broker=endpoint, keys=keys) as broker:
        until(client.meets, 10, "a frontend met the broker")
        uplink.renew()

        def joined() -> bool:
            uplink.keep()
            return "replica joined" in broker.output

        until(joined, 10, "a manager met the broker")
        assert broker.stop() == 0 and "refused" not in broker.output
    uplink.close()


@pytest.mark.parametrize("who", ["no key", "wrong server key", "not admitted", "the broker has none"])
def test_whoever_has_not_the_right_key_is_refused_and_says_so(
    who: str, keys: Path, endpoint: str, tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    make_keys(tmp_path / "other")
    shown, of_broker, reason, logged = {
        "no key": ("", keys, NO_HANDSHAKE, "a handshake failed"),
        "wrong server key": (tmp_path / "other", keys, NO_HANDSHAKE, "a handshake failed"),
        "not admitted": (tmp_path / "mixed", keys, NOT_ADMITTED, "its key is not in the clients folder"),
        "the broker has none": (keys, "", NO_HANDSHAKE, ""),
    }[who]
    shutil.copytree(tmp_path / "other", tmp_path / "mixed")
    shutil.copy(keys / "server.key", tmp_path / "mixed")
    with running("broker", broker=endpoint, keys=of_broker) as broker:
        broker.wait_for("ready")
        with Client(context, endpoint, shown) as client:
            refused(client, caplog, reason)
        if logged:
            broker.wait_for(logged, 5)
        with Client(context, endpoint, of_broker) as client:
            until(client.meets, 10, "the broker still serves")
        assert broker.stop() == 0 and broker.output.count(" warning ") == bool(logged), broker.output


def test_a_client_is_admitted_as_soon_as_its_key_is_there(
    keys: Path, endpoint: str, tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    add_client(keys, "late")
    (keys / "clients" / "late.key").rename(tmp_path / "late.key")
    with running("broker", broker=endpoint, keys=keys) as broker, Client(context, endpoint, keys / "late") as client:
        broker.wait_for("ready")
        refused(client, caplog, NOT_ADMITTED)
        public = public_key(tmp_path / "late.key").decode()
        line = broker.wait_for("warning .* its key is not in the clients folder.*")[0]
        assert public in line and "address=127.0.0.1" in line
        shutil.copy(tmp_path / "late.key", keys / "clients")
        until(client.meets, 10, "the client is admitted")
        (keys / "clients" / "late.key").unlink()
        with Client(context, endpoint, keys / "late") as another:
            until(lambda: not another.meets() and caplog.text.count("the broker refused") == 2, 5, "refused again")


def test_a_server_that_nobody_answers_for_admits_nobody(
    keys: Path, context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
):
    router = open_socket(context, zmq.ROUTER)
    protect_server(router, str(keys))
    router.bind("tcp://127.0.0.1:*")
    with Client(context, router.getsockopt_string(zmq.LAST_ENDPOINT), keys) as client:
        refused(client, caplog, NO_HANDSHAKE)
        assert not router.poll(0)
    router.close()


def assert_met(frontend: Running) -> None:
    """Its health says that a replica is missing, no longer that the broker is."""
    url = frontend.wait_for(r"ready at=(http\S+)")[1]
    until(lambda: "no replica is ready" in httpx.get(f"{url}/health").text, 10, "the broker was met")


def test_a_frontend_says_in_seconds_that_it_is_refused_and_serves_once_it_is_not(
    keys: Path, endpoint: str, tmp_path: Path
):
    add_client(keys, "late")
    (keys / "clients" / "late.key").rename(tmp_path / "late.key")
    with (
        running("broker", broker=endpoint, keys=keys) as broker,
        running("frontend", broker=endpoint, keys=keys / "late", port=0) as frontend,
    ):
        line = frontend.wait_for("warning frontend the broker refused the connection .*", 10)[0]
        assert f"endpoint={endpoint}" in line and NOT_ADMITTED in line
        frontend.wait_for("ready")
        shutil.copy(tmp_path / "late.key", keys / "clients")
        assert_met(frontend)
        assert frontend.stop() == 0 and broker.stop() == 0
        assert frontend.output.count(" warning ") == 1, frontend.output


def test_thousands_of_peers_without_keys_leave_a_broker_as_it_was(
    keys: Path, endpoint: str, context: zmq.Context[zmq.Socket[bytes]]
):
    host, port = "127.0.0.1", int(endpoint.rpartition(":")[2])
    with running("broker", broker=endpoint, keys=keys) as broker:
        broker.wait_for("ready")
        process = psutil.Process(broker.process.pid)

        def flood(count: int) -> None:
            for _ in range(count):
                with socket.create_connection((host, port)) as peer:
                    peer.sendall(NULL_GREETING)

        flood(500)
        files, memory = process.num_fds(), process.memory_info().rss
        flood(5000)
        with Client(context, endpoint, keys) as client:
            until(client.meets, 20, "the broker still serves")
        until(lambda: process.num_fds() <= files + 10, 20, "connections are closed")
        assert process.memory_info().rss < memory + (16 << 20)
        assert broker.stop() == 0
        assert broker.output.count("a handshake failed") == 1


# --- Where the broker can be --------------------------------------------------------------------------


def test_ipc_needs_no_keys_and_ignores_them(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]):
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/b"
    with running("broker", broker=endpoint, keys=tmp_path / "missing"), Client(context, endpoint, "missing") as client:
        until(client.meets, 10, "the broker was met")


def test_a_part_does_not_start_without_its_key_files(tmp_path: Path, keys: Path, endpoint: str):
    for part, missing in (
        ("broker", "server.key_secret"),
        ("workers", "client.key_secret"),
        ("frontend", "server.key"),
    ):
        (keys / missing).unlink()
        with running(part, broker=endpoint, keys=keys) as process:
            assert process.wait() == 1
            assert f"keys: cannot read {keys}/{missing}: No such file" in process.output
            assert "Traceback" not in process.output
        if part != "broker":
            shutil.rmtree(keys)
            make_keys(keys)


def test_an_address_that_is_no_address_to_connect_to(context: zmq.Context[zmq.Socket[bytes]], keys: Path):
    with pytest.raises(ValueError, match=r"cannot connect to tcp://\*:7000"):
        Connection(context, check_endpoint("tcp://*:7000", str(keys)), b"f-1", str(keys))


def test_a_broker_at_every_address_is_reached_from_another_host(keys: Path):
    with two_hosts() as (first, second), ExitStack() as parts:
        with first.entered():
            broker = parts.enter_context(running("broker", broker="tcp://*:7000", keys=keys))
        broker.wait_for("ready")
        with second.entered():
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            for address in (first.ipv4, f"[{first.ipv6}]"):
                with Client(context, f"tcp://{address}:7000", keys) as client:
                    until(client.meets, 10, f"the broker at {address} was met")
            context.term()
        assert broker.stop() == 0
