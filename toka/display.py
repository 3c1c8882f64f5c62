"""What a start shows: a bar for each part on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from toka import process

if TYPE_CHECKING:
    from rich.progress import TaskID

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
    """The one that suits: of whoever started this process and hears of the start, or of stderr."""
    if process.supervised():
        return Relay()
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


class Relay(Lines):
    """Lines, and the start told to whoever started this process as well."""

    def progress(self, part: str, text: str, fraction: float) -> None:
        super().progress(part, text, fraction)
        process.pass_on(part, text, fraction)

    def ready(self, part: str) -> None:
        super().ready(part)
        process.pass_on(part, "ready", 1.0)


class Quiet(Lines):
    """Nothing of the start, but what the parts write."""

    def progress(self, part: str, text: str, fraction: float) -> None:
        pass

    def ready(self, part: str) -> None:
        pass


class Bars(Lines):
    """Bars for `parts`, and for others when they are first heard of."""

    def __init__(self, parts: Sequence[str] = ()) -> None:
        # Rich takes a tenth of a second to import: only where it is used.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__()
        columns = (TextColumn("{task.fields[part]:<14}"), BarColumn(), TextColumn("{task.description}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._tasks = {part: self._add(part) for part in parts}
        self._bars.start()

    def _add(self, part: str) -> TaskID:
        return self._bars.add_task("starting", total=1.0, part=part)

    def _show(self, part: str, text: str, fraction: float) -> None:
        if part not in self._tasks:
            self._tasks[part] = self._add(part)
        self._bars.update(self._tasks[part], description=text, completed=fraction)

    def progress(self, part: str, text: str, fraction: float) -> None:
        if not self._closed:
            self._show(part, text, fraction)

    def ready(self, part: str) -> None:
        if self._closed:
            super().ready(part)
        else:
            self._show(part, "ready", 1.0)

    def line(self, text: str) -> None:
        if self._closed:
            super().line(text)
        else:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._bars.stop()
