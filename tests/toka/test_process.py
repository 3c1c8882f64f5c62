"""What every part does as a process."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.server import ROOT, environment, running, until
from toka.log import LineFormatter
from toka.process import NOTIFY_FD, PARENT, command_line, raise_file_limit, version


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    for flag in ("--help", "-h"):
        with pytest.raises(SystemExit) as end:
            command_line("toka-broker", "queues", "broker", ["broker=x", flag])
        assert end.value.code == 0
        assert "queue_bytes=" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        command_line("toka", "serves", None, ["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"toka {version()}\n"


def test_a_wrong_setting_ends_with_status_2_and_one_line(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        command_line("toka", "serves", None, ["prot=1"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "toka: unknown setting 'prot'; did you mean 'port'?\n"


@pytest.mark.parametrize("module", ["toka", "frontend", "broker", "workers"])
def test_every_command_answers_help_and_wrong_settings(module: str):
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", module, *args]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)

    helped = run("--help")
    assert helped.returncode == 0 and "log_level=debug|info|warning|error" in helped.stdout
    wrong = run("log_lever=info")
    assert wrong.returncode == 2 and wrong.stderr.endswith("unknown setting 'log_lever'; did you mean 'log_level'?\n")
    assert wrong.stderr.count("\n") == 1 and not wrong.stdout


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_part_starts_without_standard_streams(closed: str):
    script = "import sys, toka.process as p, toka.config as c; p.begin('x', 'x', c.Config()); "
    script += "sys.stderr.isatty(); p.log.info('a'); print(3, flush=True)"
    command = f'{sys.executable} -P -c "{script}" {closed}'
    assert subprocess.run(command, shell=True, env=environment(), timeout=60).returncode == 0


def test_a_line_of_log_is_one_line():
    record = logging.makeLogRecord(
        {
            "msg": "it %s\nhappened",
            "args": ("all",),
            "levelname": "INFO",
            "name": "",
            "port": 1,
            "who": 'a "b"',
            "none": "",
        }
    )
    line = LineFormatter("broker").format(record)
    assert line.endswith(r'info broker it all\nhappened port=1 who="a \"b\"" none=""')
    try:
        raise RuntimeError("deep")
    except RuntimeError:
        record.exc_info = sys.exc_info()
    assert "\n" not in LineFormatter("broker").format(record)


def test_a_supervised_part_tells_through_the_pipe():
    reading, writing = os.pipe()
    env = environment({NOTIFY_FD: str(writing), PARENT: str(os.getpid())})
    command = [sys.executable, "-m", "tests.support.part", "fail"]
    done = subprocess.run(command, env=env, pass_fds=[writing], cwd=ROOT, capture_output=True, text=True, timeout=60)
    os.close(writing)
    with os.fdopen(reading) as notes:
        told = [json.loads(line) for line in notes]
    assert told == [{"progress": 0.5, "text": "half way"}, {"fail": "the reason, in one sentence"}]
    assert done.returncode == 1 and not done.stderr and not done.stdout


def test_a_part_on_its_own_tells_through_the_log():
    command = [sys.executable, "-m", "tests.support.part", "fail"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "error test the reason, in one sentence" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("gone_already", [False, True])
def test_a_part_dies_with_its_parent(gone_already: bool):
    script = (
        "import os, subprocess, sys, time; os.environ['TOKA_PARENT'] = str(os.getpid() + int(sys.argv[1]));"
        "subprocess.Popen([sys.executable, '-m', 'tests.support.part', 'serve']); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(int(gone_already))]
    parent = subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        mother = psutil.Process(parent.pid)
        until(lambda: mother.children() != [], 20, "the child is there")
        [child] = mother.children()
        if not gone_already:
            until(lambda: "toka: test serve" in " ".join(child.cmdline()), 20, "the child has begun")
            parent.send_signal(signal.SIGKILL)
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 20, "the child is gone")
    finally:
        parent.kill()
        parent.wait()


def test_another_package_of_a_parts_name_is_refused(tmp_path: Path):
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()
    script = (
        "import workers\nfrom toka import process\nfrom toka.config import Config\nprocess.begin('x', 'x', Config())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"{tmp_path}/workers is another package named 'workers'" in done.stderr and "Traceback" not in done.stderr


def test_the_limit_on_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_hard_limit_on_open_files_is_warned_of(tmp_path: Path):
    tmp_path.chmod(0o700)
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512));"
        f"sys.argv[1:] = ['broker=ipc://{tmp_path}/b']; runpy.run_module('broker', run_name='__main__')"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert "few files may be open at once" in process.stderr.readline()
        assert "ready" in process.stderr.readline()
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stderr.close()


def test_ps_tells_parts_apart(tmp_path: Path):
    tmp_path.chmod(0o700)
    with running("broker", broker=f"ipc://{tmp_path}/b") as broker:
        broker.wait_for("ready")
        assert " ".join(psutil.Process(broker.process.pid).cmdline()).strip() == "toka: broker"
