"""Servers are found ready, and end with all their processes whatever happens."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from toka.process import HOME
from tools.bench.servers import LAUNCHES, Launch, ServerError, running

SERVER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("child", child.pid, flush=True)
print("curl -N http://127.0.0.1:123/v1/chat/completions", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKA_BENCH_CACHE", str(tmp_path))
    return tmp_path


def script(text: str) -> Launch:
    return Launch([sys.executable, "-c", text], LAUNCHES["toka"](Path()).ready_url)


@pytest.mark.parametrize("fails", [False, True])
def test_the_whole_family_ends(cache: Path, fails: bool) -> None:
    try:
        with running("fake", script(SERVER)) as server:
            assert server.url == "http://127.0.0.1:123"
            assert 0 < server.ready_seconds < 10
            family = [server.process, *server.process.children(recursive=True)]
            assert len(family) == 2
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_servers_end_with_a_bench_that_is_killed(cache: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from tools.bench.servers import LAUNCHES, Launch, running
with running("fake", Launch([sys.executable, "-c", {SERVER!r}], LAUNCHES["toka"](Path()).ready_url)) as server:
    print(server.process.pid, flush=True)
    time.sleep(60)
"""
    bench = subprocess.Popen([sys.executable, "-c", code], cwd=HOME, stdout=subprocess.PIPE, text=True)
    assert bench.stdout is not None
    server = psutil.Process(int(bench.stdout.readline()))
    (child,) = server.children()
    bench.kill()
    bench.wait()
    bench.stdout.close()
    _, alive = psutil.wait_procs([server], timeout=10)
    child.kill()
    assert not alive


def test_a_server_that_ends_says_why() -> None:
    began = time.monotonic()
    with (
        pytest.raises(ServerError, match=r"(?s)fake ended with status 3.*no such model"),
        running("fake", script("import sys; print('no such model'); sys.exit(3)")),
    ):
        pass
    assert time.monotonic() - began < 10


def test_settings_of_the_user_do_not_reach_a_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_MAX_SEQS", "1")
    text = "import os; print('TOKA_MAX_SEQS' in os.environ, os.environ['HF_HUB_OFFLINE'])"
    with pytest.raises(ServerError), running("fake", script(text)):
        pass
    assert (cache / "fake.log").read_text().split() == ["False", "1"]
