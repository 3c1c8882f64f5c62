"""Starting, restarting and ending parts: a real broker, and parts that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.server import POLL_SECONDS
from toka import supervisor as module
from toka.child import Part
from toka.display import Lines
from toka.supervisor import Supervisor, Unit


class Shown(Lines):
    """What a display was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def progress(self, part: str, text: str, fraction: float) -> None:
        self.told.append(f"{part}: {text} {fraction}")

    def ready(self, part: str) -> None:
        self.told.append(f"{part}: ready")

    def line(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture(autouse=True)
def others() -> Iterator[set[psutil.Process]]:
    """Processes that other tests share and that were there before; nothing else may be left."""
    before = set(psutil.Process().children(recursive=True))
    yield before
    left = set(psutil.Process().children(recursive=True)) - before
    for each in left:
        each.kill()
    assert not left


def part(behaviour: str, seconds: float | None = None, name: str = "") -> Part:
    args = [behaviour] if seconds is None else [behaviour, str(seconds)]
    return Part(name or behaviour, "tests.support.part", args)


def broker(folder: Path) -> Part:
    folder.chmod(0o700)
    return Part("broker", "broker", [f"broker=ipc://{folder}/b"])


def supervisor(*units: Unit, start: float = 30.0, shutdown: float = 5.0, restarts: int = 3) -> Supervisor:
    return Supervisor(units, Shown(), start_timeout=start, shutdown_timeout=shutdown, restart_limit=restarts)


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


async def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


async def run(watched: Supervisor, then: Callable[[], Awaitable[None]] | None = None) -> int:
    """Run it until it is ready, then do something, then send SIGTERM; its exit status."""
    ready = asyncio.Event()
    texts: dict[str, str] = {}

    async def on_ready(told: Mapping[str, str]) -> None:
        texts.update(told)
        ready.set()

    running = asyncio.create_task(watched.run(on_ready))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if ready.is_set() and then is not None:
        await then()
    if not running.done():
        signal_self(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            return await running
    raise AssertionError("the supervisor did not end")


async def test_parts_start_side_by_side_tell_their_text_and_drain(tmp_path: Path):
    watched = supervisor(
        Unit("broker", [broker(tmp_path)]), Unit("test", [part("serve")]), Unit("test", [part("other")])
    )
    told: list[Mapping[str, str]] = []

    async def tell(texts: Mapping[str, str]) -> None:
        told.append(texts)

    running = asyncio.create_task(watched.run(tell))
    await until(lambda: told)
    assert told == [{"broker": f"ipc://{tmp_path}/b", "serve": "serve", "other": "other"}]
    assert isinstance(watched._display, Shown) and "serve: half way 0.5" in watched._display.told
    assert (tmp_path / "b").exists()
    signal_self(signal.SIGINT)
    assert await running == 0
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (part("fail"), "fail failed: the reason, in one sentence"),
        (part("crash"), "crash ended with status 1: RuntimeError: a crash"),
        (part("hang"), "was not ready within 2 s"),
        (Part("broker", "broker", ["broker=ipc:///no/where/b"]), "broker failed: /no/where: No such file or directory"),
        (Part("broker", "broker", ["brokr=1"]), "broker ended with status 2: toka-broker: unknown setting 'brokr'"),
        (Part("ghost", "ghost", []), "ghost: the package 'ghost' is not beside toka"),
    ],
    ids=lambda each: each.name if isinstance(each, Part) else None,
)
async def test_a_start_that_fails_names_the_part_and_ends_the_others(
    bad: Part, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    units = Unit("good", [broker(tmp_path)]), Unit("slow", [part("hang", name="slow")]), Unit("bad", [bad])
    began = time.monotonic()
    assert await run(supervisor(*units, start=2 if bad.name == "hang" else 60)) == 1
    assert time.monotonic() - began < 30
    assert said in caplog.text
    assert not (tmp_path / "b").exists()


async def test_a_part_that_dies_takes_its_unit_along_and_both_come_back(tmp_path: Path):
    unit, other = Unit("replica", [part("serve"), part("other")]), Unit("broker", [broker(tmp_path)])
    watched = supervisor(unit, other)

    async def kill_one() -> None:
        before, bystander = [child.pid for child in unit.children], other.children[0].pid
        for victim in (1, 0):
            os.kill(before[victim], signal.SIGKILL)
            await until(lambda old=before: len(unit.children) == 2 and not set(old) & set(_pids(unit)))
            await until(lambda: all(child.served for child in unit.children))
            before = _pids(unit)
        assert other.children[0].pid == bystander

    await run(watched, kill_one)


def _pids(unit: Unit) -> list[int]:
    return [child.pid for child in unit.children]


async def test_a_unit_that_keeps_dying_is_given_up_after_the_limit(caplog: pytest.LogCaptureFixture):
    unit = Unit("replica", [part("serve", 0.05)])
    assert await run(supervisor(unit, restarts=2), lambda: until(lambda: unit.gave_up)) == 1
    assert "serve ended with status 1; given up after 2 restarts in a row" in caplog.text
    assert caplog.text.count("restarting") == 2


async def test_the_limit_counts_restarts_in_a_row_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STEADY_SECONDS", 0.1)
    unit = Unit("replica", [part("serve", 0.3)])
    seen: set[int] = set()

    async def watch() -> None:
        await until(lambda: seen.update(_pids(unit)) or len(seen) == 4)

    await run(supervisor(unit, restarts=1), watch)
    assert len(seen) == 4


async def test_one_of_two_replicas_may_be_given_up(caplog: pytest.LogCaptureFixture):
    bad, good = Unit("replica", [part("serve", 0.05, "bad")]), Unit("replica", [part("serve", name="good")])
    watched = supervisor(bad, good, restarts=0)

    async def wait() -> None:
        await until(lambda: bad.gave_up)
        await asyncio.sleep(0.2)

    assert await run(watched, wait) == 0
    assert "bad ended with status 1; given up" in caplog.text


async def test_a_part_that_does_not_drain_is_killed_and_the_status_tells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "END_SECONDS", 0.3)
    assert await run(supervisor(Unit("test", [part("stubborn")]), shutdown=0.2)) == 1
    assert "stubborn was killed by SIGKILL" in [getattr(each, "why", "") for each in caplog.records]


async def test_a_second_interrupt_kills_at_once():
    watched = supervisor(Unit("test", [part("stubborn")]), shutdown=60)

    async def interrupt() -> None:
        signal_self(signal.SIGINT)
        await asyncio.sleep(0.1)
        signal_self(signal.SIGINT)

    began = time.monotonic()
    assert await run(watched, interrupt) == 130
    assert time.monotonic() - began < 5


async def test_a_signal_during_the_start_ends_it_cleanly():
    watched = supervisor(Unit("test", [part("hang")]))

    async def stop() -> None:
        await until(lambda: watched.units[0].children)
        signal_self(signal.SIGTERM)

    stopping = asyncio.create_task(stop())
    assert await run(watched) == 0
    await stopping


async def test_what_a_part_started_itself_ends_with_it(others: set[psutil.Process]):
    unit = Unit("test", [part("mother")])

    async def kill() -> None:
        [mother] = set(psutil.Process().children()) - others
        [daughter] = mother.children()
        os.kill(mother.pid, signal.SIGKILL)
        await until(lambda: not daughter.is_running() or daughter.status() == psutil.STATUS_ZOMBIE)

    assert await run(supervisor(unit), kill) == 0
