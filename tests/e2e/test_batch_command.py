"""`toka-batch` as a command: a Toka of its own that is killed and goes on, and one that runs already."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import SIZES
from tests.support.batches import jsonl, line
from tests.support.server import Server, environment, gone, until
from toka.batch import Own, arguments

LINES = 200
CHAT = "/v1/chat/completions"


def command(*args: object, **settings: object) -> list[str]:
    given = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-P", "-m", "toka.batch", *map(str, args), *given]


def start(*args: object, **settings: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args, **settings), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*args: object, **settings: object) -> tuple[int, str]:
    with start(*args, **settings) as process:
        said, _ = process.communicate(timeout=60)
        return process.returncode, said


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


def written(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_no_line_is_lost_or_done_twice_when_it_is_killed(folder: Path, tmp_path: Path):
    rng = random.Random(3)
    bad = set(rng.sample(range(LINES), 12))
    lines: list[Any] = [line(f"r{number}", prompt=f"tale {number}", max_tokens=16) for number in range(LINES)]
    for number in bad:
        lines[number] = rng.choice(["{", line("r0"), line(f"r{number}", max_tokens=-1)])
    source, output, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    source.write_bytes(jsonl(lines))
    settings = {"errors": errors, "model": folder, "batch_items": 8, **SIZES}
    for place, least in enumerate(sorted(rng.sample(range(15, 150), 3))):
        with start(source, output, **settings) as process:
            until(lambda least=least: written(output) >= least, 60, "some lines are answered")  # type: ignore[misc]
            family = psutil.Process(process.pid).children(recursive=True)
            if place == 1:
                min(family, key=psutil.Process.create_time).kill()
                said, _ = process.communicate(timeout=30)
                assert "toka was killed by SIGKILL; " in said and said.endswith("the same command goes on from there\n")
            else:
                process.kill()
        assert written(output) < LINES - 12 and len(family) >= 5
        gone(family)
        with output.open("ab") as file:
            file.write(b'{"id":"batch_req_offline_5","custom')
    status, said = run(source, output, **settings)
    assert status == 1 and said.endswith(
        f"toka-batch: 200 of 200 lines are answered, 12 of them with an error, in {errors}\n"
    )
    good, refused = answers(output), answers(errors)
    assert sorted(int(each["custom_id"][1:]) for each in good) == sorted(set(range(LINES)) - bad)
    assert sorted(int(each["id"].rpartition("_")[2]) - 1 for each in refused) == sorted(bad)
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 16 for each in good)
    before = output.read_bytes(), errors.read_bytes()
    began = time.monotonic()
    assert run(source, output, **settings)[0] == 1 and time.monotonic() - began < 5, "nothing is started for nothing"
    assert (output.read_bytes(), errors.read_bytes()) == before


def test_a_server_that_runs_answers_chats_and_completions(server: Server, tmp_path: Path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, "temperature": 0}
    lines = [line("1"), {"custom_id": "2", "method": "POST", "url": CHAT, "body": chat}]
    source.write_bytes(jsonl(lines))
    assert run(source, output, url=f"{server.url}/v1/") == (0, "toka-batch: 2 of 2 lines are answered\n")
    kinds = {each["custom_id"]: each["response"]["body"]["object"] for each in answers(output)}
    assert kinds == {"1": "text_completion", "2": "chat.completion"}
    with source.open("ab") as file:
        file.write(jsonl([line("3"), line("4", "/v1/embeddings"), line("5", "/v1/abort"), line("6", prompt="")]))
    status, said = run(source, output, url=server.url)
    assert status == 1 and "6 of 6 lines are answered, 3 of them with an error" in said
    found = {each["custom_id"]: each for each in answers(output)}
    assert [found[each]["response"]["status_code"] for each in "1346"] == [200, 200, 404, 400]
    assert found["6"]["response"]["body"]["error"]["param"] == "prompt"
    assert found["5"]["error"]["code"] == "mismatched_url"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_and_it_says_how_to_go_on(server: Server, tmp_path: Path, number: signal.Signals):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(line(f"{n}", max_tokens=2 if n < 5 else 900) for n in range(30)))
    with start(source, output, url=server.url, batch_items=6) as process:
        until(lambda: written(output) == 5, 30, "the short ones are answered")
        process.send_signal(number)
        said, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert said == (
        f"toka-batch: stopped by {number.name}; 5 of 30 lines are answered; the same command goes on from there\n"
    )


def test_a_terminal_shows_a_bar(server: Server, tmp_path: Path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(line(f"{number}", max_tokens=30) for number in range(40)))
    ours, theirs = pty.openpty()
    env = environment({"TERM": "xterm", "COLUMNS": "160"})
    process = subprocess.Popen(command(source, output, url=server.url), env=env, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(20) == 0
    assert (
        "━" in shown.decode()
        and b"40 of 40 requests, 0 failed, " in shown
        and b" output tokens/s, 0:00:00 left" in shown
    )


def test_what_it_needs_and_cannot_have_is_named(tmp_path: Path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([line("1")]))
    assert run(tmp_path / "no.jsonl", tmp_path / "out") == (
        2,
        f"toka-batch: {tmp_path}/no.jsonl: No such file or directory\n",
    )
    status, said = run(source, tmp_path / "out", model="/no/such")
    assert status == 1 and "/no/such is no folder" in said and "0 of 1 lines are answered" in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "expected two files, IN.jsonl and OUT.jsonl"),
        (["in.jsonl", "model=x"], "expected two files"),
        (["in.jsonl", "out.jsonl", "prot"], "'prot': expected key=value"),
        (["in.jsonl", "out.jsonl", "url=http://x", "--dtype", "float32"], "dtype: a setting of a server that is"),
        (["in.jsonl", "out.jsonl", "url=localhost:80"], "url: expected http://HOST:PORT, got 'localhost:80'"),
    ],
)
def test_a_wrong_command_line_ends_in_one_sentence(args: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        arguments(args)
    assert end.value.code == 2 and capsys.readouterr().err.startswith(f"toka-batch: {said}")


def test_a_command_line_is_files_own_words_and_settings():
    own, rest = arguments(["in", "out", "--url", "http://x/v1/", "errors=bad", "batch_items=3", "api_key=k"])
    assert own == Own(Path("in"), Path("out"), Path("bad"), "http://x", "k") and rest == ["batch_items=3"]


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    for flag, said in (("--help", "usage: toka-batch IN.jsonl OUT.jsonl"), ("--version", "toka-batch 0.")):
        with pytest.raises(SystemExit) as end:
            arguments([flag])
        assert end.value.code == 0 and said in capsys.readouterr().out
