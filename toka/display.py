"""What a start shows: a bar for each part on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger(__name__)


class Display(Protocol):
    def progress(self, part: str, text: str, fraction: float) -> None:
        """A part does what `text` says; it is `fraction` (0 to 1) through."""

    def ready(self, part: str) -> None: ...

    def line(self, text: str) -> None:
        """Pass on one line that a part wrote."""

    def close(self) -> None:
        """The start is over; lines go on."""


def display(parts: Sequence[str]) -> Display:
    """The display that suits stderr."""
    return Bars(parts) if sys.stderr.isatty() else Lines()


class Lines:
    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._closed = False

    def progress(self, part: str, text: str, fraction: float) -> None:
        if self._last.get(part) != text and not self._closed:
            self._last[part] = text
            log.info(f"{part}: {text}")

    def ready(self, part: str) -> None:
        log.info(f"{part}: ready")

    def line(self, text: str) -> None:
        # Whoever reads may be gone; parts must be able to write all the same.
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        self._closed = True


class Bars(Lines):
    def __init__(self, parts: Sequence[str]) -> None:
        # Rich takes a tenth of a second to import: only where it is used.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__()
        columns = (TextColumn("{task.fields[part]:<14}"), BarColumn(), TextColumn("{task.description}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._tasks = {part: self._bars.add_task("starting", total=1.0, part=part) for part in parts}
        self._bars.start()

    def progress(self, part: str, text: str, fraction: float) -> None:
        if not self._closed:
            self._bars.update(self._tasks[part], description=text, completed=fraction)

    def ready(self, part: str) -> None:
        if self._closed:
            super().ready(part)
        else:
            self._bars.update(self._tasks[part], description="ready", completed=1.0)

    def line(self, text: str) -> None:
        if self._closed:
            super().line(text)
        else:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._bars.stop()
