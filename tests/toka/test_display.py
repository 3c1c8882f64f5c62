"""What a start shows on a terminal, and elsewhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from tests.support.server import environment
from toka.display import Lines
from toka.process import NOTIFY_FD

SCRIPT = """
import time
from toka.display import display
shown = display(["stage r0.0"])
shown.progress("stage r0.0", "reading weights", 0.25)
shown.line("a line of [a part]")
time.sleep(0.3)
shown.ready("frontend")
shown.close()
shown.line("afterwards")
"""


def test_a_terminal_shows_a_bar_for_each_part_and_lines_above_them():
    ours, theirs = pty.openpty()
    env = environment({"TERM": "xterm", "COLUMNS": "100"})
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs, env=env)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(20) == 0
    text = output.decode()
    assert "stage r0.0" in text and "reading weights" in text and "frontend" in text
    assert "a line of [a part]" in text
    assert text.rstrip().endswith("afterwards")


def test_who_started_the_process_hears_of_its_parts():
    heard, tell = os.pipe()
    script = f"from toka import config, process\nprocess.begin('toka', 'toka', config.Config())\n{SCRIPT}"
    env = environment({NOTIFY_FD: str(tell)})
    done = subprocess.run([sys.executable, "-c", script], env=env, pass_fds=[tell], capture_output=True, text=True)
    os.close(tell)
    with os.fdopen(heard) as notes:
        assert [json.loads(each) for each in notes] == [
            {"part": "stage r0.0", "progress": 0.25, "text": "reading weights"},
            {"part": "frontend", "progress": 1.0, "text": "ready"},
        ]
    assert "stage r0.0: reading weights" in done.stderr and done.stderr.endswith("afterwards\n")


def test_elsewhere_each_thing_done_is_one_line(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]):
    caplog.set_level("INFO")
    lines = Lines()
    for percent in range(100):
        lines.progress("stage r0.0", "reading weights", percent / 100)
    lines.ready("stage r0.0")
    lines.line("passed on")
    lines.close()
    lines.progress("stage r0.0", "again", 0.5)
    assert [each.getMessage() for each in caplog.records] == ["stage r0.0: reading weights", "stage r0.0: ready"]
    assert capsys.readouterr().err == "passed on\n"
