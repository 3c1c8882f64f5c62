"""How far `toka-batch` is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

BAR_SECONDS = 0.25
LINE_SECONDS = 5.0


@dataclass(slots=True)
class Progress:
    """Lines of the input, of which some were answered before; output tokens of this run."""

    total: int
    done: int
    failed: int
    tokens: int = 0
    before: int = field(init=False)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.before = self.done

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(time.monotonic() - self.began, 1e-3)

    @property
    def left(self) -> str:
        """How long it may still take, `-` where nobody knows."""
        answered = self.done - self.before
        if not answered:
            return "-"
        seconds = (time.monotonic() - self.began) / answered * (self.total - self.done)
        return str(datetime.timedelta(seconds=round(seconds)))

    def __str__(self) -> str:
        return (
            f"{self.done:,} of {self.total:,} requests, {self.failed:,} failed, "
            f"{self.tokens_per_second:,.0f} output tokens/s, {self.left} left"
        )


class Shown(Protocol):
    seconds: float
    """Between two updates."""

    def update(self) -> None: ...


class _Line:
    seconds = LINE_SECONDS

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def update(self) -> None:
        print(f"toka-batch: {self._progress}", file=sys.stderr, flush=True)


@contextmanager
def shown(progress: Progress) -> Iterator[Shown]:
    """What shows `progress` on stderr."""
    if not sys.stderr.isatty():
        yield _Line(progress)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    with Bars(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True)) as bars:
        task = bars.add_task(str(progress), total=progress.total, completed=progress.done)

        class Bar:
            seconds = BAR_SECONDS

            def update(self) -> None:
                bars.update(task, description=str(progress), completed=progress.done)

        yield Bar()
        bars.update(task, description=str(progress), completed=progress.done)
