"""`toka` and its parts as real processes on a tiny model: starts that fail, ends, deaths, folders."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server import ROOT, Running, Server, environment, free_port, running, serve, until
from tests.support.tiny import tiny_config
from toka.config import Config, load
from toka.folders import run_folder
from toka.launcher import example, replica_units, until_serving
from toka.supervisor import Unit

PARTS = ["toka: broker", "toka: frontend", "toka: manager r0", "toka: matcher r0", "toka: stage r0.0"]
SMALL: dict[str, object] = {"weights": "random", "max_seqs": 4, "kv_cache_tokens": 2048, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_config(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def private() -> Iterator[Path]:
    """A private folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "The sea was", "max_tokens": 4, "ignore_eos": True, "seed": 1, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def fails(process: Running, status: int, *said: str) -> None:
    """It ends with this status, having said these things, with no traceback and nothing left behind."""
    assert process.wait(30) == status, process.output
    assert all(each in process.output for each in said), process.output
    assert "Traceback" not in process.output
    assert not process.left()


# --- Starts that fail ---------------------------------------------------------------------------------


def test_a_model_that_is_not_there_ends_the_start_and_names_a_part(private: Path):
    began = time.monotonic()
    with running("toka", port=0, model="/no/such/model", env={"TMPDIR": str(private), "XDG_RUNTIME_DIR": ""}) as toka:
        fails(toka, 1, "failed:", "/no/such/model")
        assert any(f" {part} failed: " in toka.output for part in ("frontend", "manager r0", "stage r0.0"))
    assert time.monotonic() - began < 20
    assert list(private.iterdir()) == [], "its run folder is gone"


@pytest.mark.parametrize("frontends", [1, 2])
def test_a_port_in_use_is_named(model: Path, frontends: int):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running("toka", port=port, frontends=frontends, model=model, **SMALL) as toka:
            fails(toka, 1, f"cannot listen on 127.0.0.1:{port}: Address already in use")


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"prot": 1}, 2, "toka: unknown setting 'prot'; did you mean 'port'?"),
        ({"dtype": "int3"}, 2, "toka: dtype: expected one of auto, float32, bfloat16"),
        ({"run_dir": "/proc/nowhere"}, 1, "run_dir: /proc/nowhere"),
        ({"run_dir": "/tmp/" + "x" * 80}, 1, "too long for socket files"),
        ({"run_dir": "/usr"}, 1, "private"),
        ({"broker": "tcp://0.0.0.0:5000"}, 1, "refused unless the address is loopback"),
        ({"replica": "a/b"}, 1, "replica: expected at most 16 letters"),
        ({"replica": "abcdefghijklmno", "dp_size": 2}, 1, "got 'abcdefghijklmno-0'"),
        ({"device": "cuda", "dp_size": 999}, 1, "dp_size=999 pp_size=1 tp_size=1 needs 999 GPUs, "),
    ],
)
def test_wrong_settings_end_in_one_sentence(settings: dict[str, object], status: int, said: str):
    with running("toka", **settings) as toka:
        fails(toka, status, said)
        assert len(toka.lines) == 1


def test_parts_need_a_broker_to_go_to(model: Path):
    for part in ("frontend", "broker", "workers"):
        with running(part) as process:
            fails(process, 1, "broker:")


def test_a_run_folder_serves_one_at_a_time_and_is_emptied_of_sockets(private: Path):
    import socket

    folder = private / "new"
    with run_folder(str(folder)) as used:
        assert stat.S_IMODE(used.stat().st_mode) == 0o700
        with pytest.raises(ValueError, match="another process uses"), run_folder(str(folder)):
            pass
        with socket.socket(socket.AF_UNIX) as bound:
            (used / "r0").mkdir()
            bound.bind(str(used / "r0" / "plans-0"))
        (used / "file").touch()
    assert sorted(each.name for each in folder.rglob("*")) == ["file", "r0"]


def test_the_example_goes_where_a_server_of_all_addresses_can_be_reached():
    assert "http://127.0.0.1:80/v1/chat/completions" in example("http://0.0.0.0:80")
    assert "http://[::1]:80/v1/chat/completions" in example("http://[::]:80")


async def test_a_start_is_over_when_each_frontend_that_is_not_given_up_has_answered():
    """Answers that are cut off say nothing, and of one that is given up none comes."""
    body = b'{"status":"ok","frontend":0}'
    whole = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    cuts = iter([0, 5, whole.index(b"\r\n"), len(whole) - len(body), len(whole) - 5])
    units = [Unit("frontend", []), Unit("frontend", [])]
    answered = 0

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        await reader.readuntil(b"\r\n\r\n")
        cut = next(cuts, None)
        writer.write(whole[:cut])
        writer.close()
        answered += cut is None
        if answered == 3:
            units[1].gave_up = True

    async with await asyncio.start_server(serve_one, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await asyncio.wait_for(until_serving([f"http://127.0.0.1:{port}"], units), 10)
    assert answered == 3


def test_a_replica_has_a_folder_and_processes_of_its_own(private: Path):
    config = Config(dp_size=2, pp_size=2, tp_size=2, device="cpu", threads=3, replica="east", run_dir=str(private))
    units = replica_units(config, private)
    assert [unit.parts[0].name for unit in units] == ["manager east-0", "manager east-1"]
    stages = [f"stage east-1.{number}" for number in range(4)]
    assert [part.name for part in units[1].parts[1:]] == ["matcher east-1", *stages]
    assert [part.env["TOKA_STAGE"] for part in units[1].parts[2:]] == ["0", "1", "2", "3"]
    folders = {load(part.args, "worker").run_dir for unit in units for part in unit.parts}
    assert folders == {str(private / "east-0"), str(private / "east-1")} and (private / "east-1").is_dir()
    own = load(units[0].parts[3].args, "worker")
    assert (own.replica, own.pp_size, own.tp_size, own.threads) == ("east-0", 2, 2, 3)


# --- A whole server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serve(model=model, restart_limit=20, **SMALL) as server:
        yield server


def test_the_last_line_of_a_start_can_be_pasted_into_a_shell(server: Server):
    from tests.support.needs import needs

    needs("curl")
    line = next(line for line in server.lines if line.startswith("curl "))
    answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0 and "data: [DONE]" in answer.stdout


def test_a_full_disk_behind_stdout_does_not_end_the_server(model: Path):
    command = [sys.executable, "-P", "-m", "toka", "port=0", f"model={model}"]
    command += [f"{key}={value}" for key, value in SMALL.items()]
    with Path("/dev/full").open("w") as full:
        toka = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
    try:
        assert toka.stderr is not None
        url = next(found[1] for line in toka.stderr if (found := re.search(r" ready url=(\S+)", line)))
        time.sleep(0.5)
        assert serves(url)
        toka.terminate()
        assert toka.wait(30) == 0
    finally:
        toka.kill()


def test_ps_tells_the_parts_apart_and_only_the_stage_has_torch(server: Server):
    parts = server.parts()
    assert sorted(parts) == PARTS
    for title, part in parts.items():
        has_torch = any("torch" in each.path for each in part.memory_maps())
        assert has_torch == title.startswith("toka: stage"), title


def test_requests_are_silent_in_the_log(server: Server):
    before = len(server.lines)
    complete(server.url)
    httpx.post(f"{server.url}/v1/completions", json={"prompt": []})
    assert server.lines[before:] == []


@pytest.mark.parametrize("title", PARTS)
def test_a_part_that_is_killed_comes_back_at_the_same_port(server: Server, title: str):
    answer = complete(server.url)["choices"][0]["text"]
    victim = server.part(title)
    victim.kill()
    until(lambda: title in (now := server.parts()) and now[title].pid != victim.pid, 60, f"another {title}")
    until(lambda: serves(server.url), 60, f"/health after the death of {title}:\n{server.output}")
    assert complete(server.url)["choices"][0]["text"] == answer
    assert sorted(server.parts()) == PARTS


def test_a_request_outlives_the_replica_that_ran_it(server: Server):
    whole = complete(server.url, max_tokens=200)["choices"][0]["text"]
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(complete(server.url, max_tokens=200)["choices"][0]["text"]))
    asking.start()
    time.sleep(0.05)
    server.part("toka: stage r0.0").kill()
    asking.join(60)
    assert answers == [whole]


def answering(url: str) -> int:
    """The number of the frontend that a new connection reaches."""
    answer = httpx.get(f"{url}/ready", timeout=30)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["frontend"])


def test_frontends_share_the_port_and_one_that_dies_is_waited_for(model: Path):
    with serve(model=model, frontends=3, **SMALL) as server:
        titles = [f"toka: frontend {number}" for number in range(3)]
        assert sorted(server.parts()) == sorted([*titles, *PARTS[:1], *PARTS[2:]])
        # All serve as soon as the start is over, and none of the connections is refused while one is away.
        assert {answering(server.url) for _ in range(60)} == {0, 1, 2}
        victim = server.part("toka: frontend 1")
        victim.kill()
        assert {answering(server.url) for _ in range(60)} == {0, 1, 2}
        assert server.part("toka: frontend 1").pid != victim.pid
        with running("toka", port=server.url.rpartition(":")[2], frontends=2, model=model, **SMALL) as second:
            fails(second, 1, "cannot listen on")
        complete(server.url)


@contextlib.contextmanager
def frozen(part: psutil.Process) -> Iterator[None]:
    part.suspend()
    try:
        yield
    finally:
        part.resume()


def replicas_of(server: Server) -> int:
    try:
        return int(httpx.get(f"{server.url}/health", timeout=5).json().get("replicas", 0))
    except httpx.TransportError:
        return 0


def test_replicas_share_the_work_and_one_that_dies_costs_no_request(model: Path):
    with serve(model=model, dp_size=2, restart_limit=20, **SMALL) as server:
        second = [part.replace("r0", "r1") for part in PARTS[2:]]
        assert sorted(server.parts()) == sorted([*PARTS, *second])
        until(lambda: replicas_of(server) == 2, 60, "both replicas")
        whole = complete(server.url, max_tokens=100)["choices"][0]["text"]
        for name in ("r0", "r1"):
            with frozen(server.part(f"toka: manager {name}")):
                assert complete(server.url, max_tokens=100)["choices"][0]["text"] == whole, "the other one serves"
            until(lambda: replicas_of(server) == 2, 60, "both replicas again")
        with ThreadPoolExecutor(20) as pool:
            answers = [pool.submit(complete, server.url, max_tokens=100) for _ in range(20)]
            time.sleep(0.1)
            victim, other = server.part("toka: stage r1.0"), server.part("toka: stage r0.0")
            victim.kill()
            assert {answer.result()["choices"][0]["text"] for answer in answers} == {whole}
        until(lambda: replicas_of(server) == 2, 60, "the replica that died")
        assert server.part("toka: stage r1.0").pid != victim.pid
        assert server.part("toka: stage r0.0").pid == other.pid, "it is restarted alone"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_leaves_nothing(model: Path, private: Path, number: int):
    with serve(model=model, run_dir=private / "run", **SMALL) as server:
        statuses: list[int] = []
        body = {"prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "stream": True}

        def ask() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                started.set()
                text = "".join(answer.iter_text())
                statuses.append(answer.status_code if text.rstrip().endswith("data: [DONE]") else 0)

        started = threading.Event()
        asking = threading.Thread(target=ask)
        asking.start()
        assert started.wait(30)
        assert server.stop(number) == 0, server.output
        asking.join(10)
        assert statuses == [200]
    assert not [path for path in (private / "run").rglob("*") if path.is_socket()]


def test_a_launcher_that_is_killed_takes_its_parts_along(model: Path, private: Path):
    with running("toka", port=0, model=model, run_dir=private / "run", **SMALL) as toka:
        toka.wait_for("^curl ")
        assert sorted(toka.parts()) == PARTS
        toka.process.kill()
        toka.wait()
        until(lambda: not toka.left(), 10, "all parts are gone")
    # What it left in the folder is no obstacle to the next.
    with serve(model=model, run_dir=private / "run", **SMALL) as server:
        complete(server.url)


def test_a_replica_that_cannot_come_back_ends_the_server_with_a_failure(tmp_path: Path):
    model = tiny_config(tmp_path / "tiny")
    with running("toka", port=0, model=model, restart_limit=1, **SMALL) as toka:
        toka.wait_for("^curl ")
        (model / "config.json").unlink()
        toka.part("toka: stage r0.0").kill()
        fails(toka, 1, "given up after 1 restarts in a row")


def test_packages_of_the_same_names_in_the_folder_of_the_start_are_not_picked_up(model: Path, tmp_path: Path):
    for name in ("workers", "frontend", "broker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the wrong {name}')")
    (tmp_path / "toka.py").write_text("raise SystemExit('the wrong toka')")
    with serve(
        cwd=tmp_path, env={"PYTHONPATH": environment()["PYTHONPATH"] + os.pathsep}, model=model, **SMALL
    ) as server:
        complete(server.url)
        assert "the wrong" not in server.output


# --- Part by part -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["broker", "frontend", "workers"])), ids="-".join)
def test_parts_started_by_hand_find_each_other_in_any_order(model: Path, private: Path, order: tuple[str, ...]):
    by_hand(model, private, f"ipc://{private}/b", order)
    assert not [path for path in private.rglob("*") if path.is_socket()]


def test_parts_find_each_other_over_tcp(model: Path, private: Path):
    by_hand(model, private, f"tcp://127.0.0.1:{free_port()}", ("workers", "frontend", "broker"))


def by_hand(model: Path, folder: Path, broker: str, order: tuple[str, ...]) -> None:
    settings: dict[str, dict[str, object]] = {
        "broker": {"broker": broker},
        "frontend": {"broker": broker, "port": 0, "model": model},
        "workers": {"broker": broker, "model": model, "run_dir": folder / "w", **SMALL},
    }
    parts = {each: Running(each, settings[each]) for each in order}
    try:
        url = parts["frontend"].wait_for(r"ready at=(http\S+)")[1]
        until(lambda: serves(url), 60, "/health")
        complete(url)
        for each in ("frontend", "workers", "broker"):
            assert parts[each].stop() == 0, parts[each].output
            assert not parts[each].left()
    finally:
        for part in parts.values():
            part.end()
