"""A timeline of what processes did, as a Chrome trace for ui.perfetto.dev (the setting `trace`).

Each process keeps its events in memory (`Recorder`) and leaves them as a file in its replica's run folder when it
ends by itself; who started the processes makes one file of these (`gathered`). A process that is killed, or dies of
an error that no `finally` sees, leaves nothing: the others' events are there without its own.

Events are stamped with the monotonic clock, which the processes of a host share, and written in time of the wall
clock, which is where the timelines of torch.profiler have theirs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MOST_EVENTS = 500_000
"""What a process keeps, the first ones: about 100 MB."""
DEVICE_TRACK = 1 << 22
"""Number of the track of a GPU's steps, and the first of those of its streams: no thread has it."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = "cpu_op"
"""Categories of torch's own events that a timeline takes over: of the GPU's streams, and of operators on a CPU."""
QUEUED = "plans queued"
"""Counter, of the one value `plans`: plans that were sent and whose results have not come."""

Json = dict[str, Any]
log = logging.getLogger(__name__)


class Recorder:
    """The events of one process. While it is not `on` it keeps nothing, at next to no cost."""

    def __init__(self, part: str, process: str, *, on: bool = True, most: int = MOST_EVENTS) -> None:
        """part: category of the spans, e.g. "stage". process: its title in the timeline, e.g. "stage r0.0"."""
        self.on = on
        self._part, self._most = part, most
        self._events: list[tuple[str, int, str, str, int, int, Json]] = []
        """(phase, track, name, category, began, duration, arguments), in ns of the monotonic clock."""
        self._tracks: dict[int, str] = {}
        self._to_wall = time.time_ns() - time.perf_counter_ns()
        self._process = process
        self.dropped = 0

    def name_track(self, name: str, track: int = 0) -> None:
        """Give a track its title; 0 stands for the calling thread's."""
        self._tracks[track or threading.get_native_id()] = name

    def span(self, name: str, **arguments: Any) -> contextlib.AbstractContextManager[None]:
        """Record, as a span on the calling thread's track, the time within a `with` statement."""
        return _Span(self, name, arguments) if self.on else _NOTHING

    def add(
        self, name: str, began: int, ended: int, *, track: int = 0, category: str = "", arguments: Json | None = None
    ) -> None:
        """Record a span that was measured elsewhere, in ns of `time.perf_counter_ns`."""
        track = track or threading.get_native_id()
        self._keep(("X", track, name, category or self._part, began, ended - began, arguments or {}))

    def add_wall(self, name: str, began: int, ended: int, *, track: int, category: str) -> None:
        """Record a span that was measured elsewhere, in ns of `time.time_ns`."""
        self.add(name, began - self._to_wall, ended - self._to_wall, track=track, category=category)

    def count(self, name: str, **values: float) -> None:
        """Record what the values of the counter `name` are from now on."""
        self._keep(("C", 0, name, self._part, time.perf_counter_ns(), 0, values))

    def _keep(self, event: tuple[str, int, str, str, int, int, Json]) -> None:
        if not self.on:
            return
        if len(self._events) < self._most:
            self._events.append(event)
        else:
            self.dropped += 1

    def write(self, path: Path) -> None:
        """Write all events as a trace of its own; OSError where that fails."""
        base, shift = time.time_ns(), self._to_wall
        if self._events:
            base = min(event[4] for event in self._events) + shift
        process = os.getpid()
        titles = ({**each, "ph": "M", "pid": process} for each in self._titles())
        _write(path, base, itertools.chain(titles, (_event(each, process, shift - base) for each in self._events)))

    def leave(self, folder: str) -> None:
        """Leave the events in `folder` for `gathered`, if there is a recording."""
        if not self.on:
            return
        if self.dropped:
            log.warning("the trace is not whole", extra={"kept": len(self._events), "dropped": self.dropped})
        path = Path(folder, f"{os.getpid()}.trace")
        try:
            self.write(path.with_suffix(".unfinished"))
            path.with_suffix(".unfinished").replace(path)
        except OSError as error:
            log.error(f"trace: {error.filename}: {error.strerror}")

    def _titles(self) -> Iterator[Json]:
        yield {"name": "process_name", "tid": os.getpid(), "args": {"name": self._process}}
        for track, name in self._tracks.items():
            yield {"name": "thread_name", "tid": track, "args": {"name": name}}
            # The device goes below the threads, its steps above its streams.
            order = {"sort_index": max(0, track - DEVICE_TRACK + 1)}
            yield {"name": "thread_sort_index", "tid": track, "args": order}
        if self.dropped:
            yield {"name": "toka_dropped_events", "tid": os.getpid(), "args": {"dropped": self.dropped}}


OFF = Recorder("", "", on=False)


class _Span:
    __slots__ = ("_arguments", "_began", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, arguments: Json) -> None:
        self._recorder, self._name, self._arguments = recorder, name, arguments

    def __enter__(self) -> None:
        self._began = time.perf_counter_ns()

    def __exit__(self, *exception: object) -> None:
        self._recorder.add(self._name, self._began, time.perf_counter_ns(), arguments=self._arguments)


_NOTHING = contextlib.nullcontext()


def _event(event: tuple[str, int, str, str, int, int, Json], process: int, shift: int) -> Json:
    phase, track, name, category, began, duration, arguments = event
    made = {"ph": phase, "name": name, "cat": category, "pid": process, "tid": track, "args": arguments}
    made["ts"] = (began + shift) / 1000
    if phase == "X":
        made["dur"] = duration / 1000
    return made


def _write(path: Path, base: int, events: Iterable[Json]) -> None:
    """base: where time stamps of the events, in us, count from, in ns of the wall clock."""
    rest, comma = iter(events), ""
    with path.open("w") as file:
        file.write(f'{{"baseTimeNanoseconds": {base}, "displayTimeUnit": "ms", "traceEvents": [')
        while some := list(itertools.islice(rest, 1000)):
            file.write(f"{comma}\n{json.dumps(some)[1:-1]}")
            comma = ","
        file.write("\n]}\n")


@contextlib.contextmanager
def gathered(path: str, folder: Path) -> Iterator[None]:
    """At the end, make one trace at `path` of what the processes in between leave in `folder` or a folder in it.

    Does nothing where `path` is empty. ValueError, in one sentence, where it cannot be written.
    """
    if not path:
        yield
        return
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ValueError(f"trace: {path}: {error.strerror}") from None
    for left in [*folder.rglob("*.trace"), *folder.rglob("*.unfinished")]:
        left.unlink()
    try:
        yield
    finally:
        try:
            _merge(sorted(folder.rglob("*.trace")), Path(path))
        except OSError as error:
            log.error(f"trace: {path}: {error.strerror}")


def _merge(parts: list[Path], path: Path) -> None:
    traces = [json.loads(part.read_text()) for part in parts]
    base = min((trace["baseTimeNanoseconds"] for trace in traces), default=0)

    def events() -> Iterator[Json]:
        for trace in traces:
            shift = (trace["baseTimeNanoseconds"] - base) / 1000
            for event in trace["traceEvents"]:
                if "ts" in event:
                    event["ts"] = round(event["ts"] + shift, 3)
                yield event

    _write(path, base, events())
    for part in parts:
        part.unlink()
    log.info("trace written", extra={"path": path, "processes": len(parts)})
