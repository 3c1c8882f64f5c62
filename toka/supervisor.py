"""Starts parts as processes, restarts the ones that die, and ends them in order.

Parts that live and die together are a *unit*: the broker, a frontend, a replica (its manager, matcher and stages).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from toka.child import Child, Part, PartFailed
from toka.display import Display
from toka.process import explain

LAST_WORDS_SECONDS = 1.0
"""For a part that ended before it was ready to have said why."""
STEADY_SECONDS = 5.0
"""A unit that dies sooner than this after it became ready has not been restarted with success."""
BACKOFF_SECONDS = 0.25
"""Before the second restart in a row; doubled before each further one, up to ..."""
BACKOFF_MOST = 15.0
END_SECONDS = 5.0
"""What parts may take to end beyond the time that running requests have."""
ABORT_SECONDS = 2.0
"""What parts may take to end where no request could finish anyway."""
INTERRUPTED = 128 + signal.SIGINT

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Unit:
    """Parts that live and die as one. The first is asked to end, and ends the others."""

    kind: str
    """When all units of a kind have given up, nothing can serve."""
    parts: list[Part]
    children: list[Child] = field(default_factory=list)
    restarts: int = 0
    """Restarts since it last served for STEADY_SECONDS."""
    gave_up: bool = False

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    def close(self) -> None:
        """It is not started again."""
        for part in self.parts:
            part.close()


class Supervisor:
    """Runs `units`. At the end, those of one kind end together, the kinds in the order they are given."""

    def __init__(
        self,
        units: Sequence[Unit],
        display: Display,
        *,
        start_timeout: float,
        shutdown_timeout: float,
        restart_limit: int,
    ) -> None:
        self.units = units
        self._display = display
        self._start_timeout = start_timeout
        self._shutdown_timeout = shutdown_timeout
        self._restart_limit = restart_limit
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    async def run(self, on_ready: Callable[[Mapping[str, str]], Coroutine[Any, Any, None]]) -> int:
        """Start all units, keep them running until a signal comes or one gives up, end them; the exit status.

        `on_ready` gets what each part told when it became ready, by the part's name, and runs beside them.
        """
        self._listen()
        try:
            texts = await self._unless_stopped(_together(self._start(unit) for unit in self.units))
            self._display.close()
            if texts is None:
                await self._end([child for unit in self.units for child in unit.children], ABORT_SECONDS)
                return self._status(0)
            announcing = on_ready({name: text for each in texts for name, text in each.items()})
            await self._unless_stopped(_together([announcing, *(self._keep(unit) for unit in self.units)]))
            return self._status(await self._drain())
        except PartFailed as failure:
            self._display.close()
            explain(str(failure))
            await self._end([child for unit in self.units for child in unit.children], ABORT_SECONDS)
            return self._status(1)

    def _status(self, status: int) -> int:
        return INTERRUPTED if self._kill.is_set() else status

    def _listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            log.info("shutting down", extra={"signal": number.name})
            self._stop.set()
        elif number == signal.SIGINT:
            self._kill.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None where a signal came first and `work` was given up."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None

    # --- Starting and restarting ----------------------------------------------------------------------

    async def _start(self, unit: Unit) -> dict[str, str]:
        """Start a unit's parts side by side; what they told, by name. Raises PartFailed for the first that fails."""
        unit.children = []
        for part in unit.parts:
            unit.children.append(Child(part, self._display))
        ready = asyncio.create_task(_together(child.ready(self._start_timeout) for child in unit.children))
        death = asyncio.create_task(_first_death(unit.children))
        try:
            # One that was ready may die while another still starts, and the other may wait for it.
            await asyncio.wait([ready, death], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([ready], timeout=LAST_WORDS_SECONDS)
            if not ready.done():
                raise PartFailed(death.result())
            return {part.name: text for part, text in zip(unit.parts, ready.result())}
        finally:
            ready.cancel()
            death.cancel()

    async def _keep(self, unit: Unit) -> None:
        """Restart the unit whenever a part of it dies. Raises PartFailed when nothing can serve any more."""
        ready_at: float | None = time.monotonic()
        while True:
            if ready_at is not None:
                why = await _first_death(unit.children)
                if time.monotonic() - ready_at >= STEADY_SECONDS:
                    unit.restarts = 0
            for child in unit.children:
                child.kill()
            await _together(child.ended() for child in unit.children)
            if unit.restarts >= self._restart_limit:
                self._give_up(unit, why)
                return
            delay = min(BACKOFF_MOST, BACKOFF_SECONDS * 2 ** (unit.restarts - 1)) if unit.restarts else 0.0
            unit.restarts += 1
            log.warning("restarting", extra={"unit": unit.name, "why": why, "after": delay})
            await asyncio.sleep(delay)
            try:
                await self._start(unit)
                ready_at = time.monotonic()
            except PartFailed as failure:
                ready_at, why = None, str(failure)

    def _give_up(self, unit: Unit, why: str) -> None:
        unit.gave_up = True
        unit.close()
        sentence = f"{why}; given up after {unit.restarts} restarts in a row"
        if all(each.gave_up for each in self.units if each.kind == unit.kind):
            raise PartFailed(sentence)
        log.error(sentence)

    # --- Ending ---------------------------------------------------------------------------------------

    async def _drain(self) -> int:
        """End kind after kind; 0 where every part ended by itself and in time."""
        for unit in self.units:
            unit.close()
        deadline = time.monotonic() + self._shutdown_timeout + END_SECONDS
        clean = True
        for kind in dict.fromkeys(unit.kind for unit in self.units):
            units = [unit for unit in self.units if unit.kind == kind]
            first = [unit.children[0] for unit in units if unit.children]
            others = [child for unit in units for child in unit.children[1:]]
            unclean = await self._end(first, max(deadline - time.monotonic(), END_SECONDS))
            unclean += await self._end(others, END_SECONDS, ask=False)
            for child in unclean:
                if child.served:
                    log.warning("ended uncleanly", extra={"why": child.epitaph()})
                    clean = False
        return 0 if clean else 1

    async def _end(self, children: Sequence[Child], seconds: float, *, ask: bool = True) -> list[Child]:
        """Ask the children to end (or expect it of them), and kill what is alive after `seconds`.

        Returns those that did not end with status 0.
        """
        children = [child for child in children if child.alive]
        for child in children if ask else ():
            child.terminate()
        ended, kill = (
            asyncio.create_task(_together(c.ended() for c in children)),
            asyncio.create_task(self._kill.wait()),
        )
        await asyncio.wait([ended, kill], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        for child in children:
            child.kill()
        await ended
        return [child for child in children if child.status]


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, side by side; where one raises, the others are given up."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _first_death(children: Sequence[Child]) -> str:
    """Wait until one of them has ended; which one and why."""
    tasks = [asyncio.create_task(child.ended()) for child in children]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    return next(child for child in children if not child.alive).epitaph()
