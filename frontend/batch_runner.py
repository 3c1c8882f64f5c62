"""Has the batches run that wait: in one frontend at a time, the one that holds the lock file in data_dir."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import AsyncIterator

from frontend.batch_run import BatchRun
from frontend.in_process import InProcess
from frontend.service import Service
from frontend.store import Store, explain

LOCK = "runner.lock"
LOOK_SECONDS = 0.5
"""Between looks at what other frontends have changed."""
SWEEP_SECONDS = 60.0
ACTIVE_BATCHES = 4
"""Run at once: beside one with a long tail others go on."""

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def running_batches(service: Service, post: InProcess) -> AsyncIterator[None]:
    """While batches run, where the server keeps files at all. What is under way at the end starts over later."""
    if service.store is None:
        yield
        return
    # A connection of its own: routes do not wait for its long transactions.
    store = Store(service.config.data_dir)
    runner = asyncio.create_task(_Runner(service, store, post).run())
    try:
        yield
    finally:
        runner.cancel()
        await asyncio.wait([runner])
        store.close()


class _Runner:
    def __init__(self, service: Service, store: Store, post: InProcess) -> None:
        self._service, self._store, self._post = service, store, post
        self._slots = asyncio.Semaphore(service.config.batch_items)
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._sweep_at = 0.0

    async def run(self) -> None:
        """Run until cancelled."""
        lock = os.open(self._store.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            held = False
            while True:
                held = held or _locked(lock)
                try:
                    if held:
                        await self._look()
                except (OSError, sqlite3.Error) as error:
                    log.warning(explain(error, self._store.folder))
                except Exception:
                    log.exception("batches could not be looked at")
                self._service.batch_news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._service.batch_news.wait(), LOOK_SECONDS)
        finally:
            tasks = [task for _, task in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._store.call(lambda: None)  # What is being written has been, before another frontend reads.
            os.close(lock)

    async def _look(self) -> None:
        """Start what waits, and stop what is to be cancelled."""
        self._runs = {batch: each for batch, each in self._runs.items() if not each[1].done()}
        for batch, status in await self._store.call(self._store.active):
            if batch in self._runs:
                if status == "cancelling":
                    self._runs[batch][0].stop()
            elif len(self._runs) < ACTIVE_BATCHES or status == "cancelling":
                run = BatchRun(self._service, self._store, self._post, self._slots, batch)
                task = asyncio.create_task(run.run())
                task.add_done_callback(lambda _: self._service.batch_news.set())
                self._runs[batch] = run, task
        now = asyncio.get_running_loop().time()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS
            await self._store.call(self._store.sweep)


def _locked(descriptor: int) -> bool:
    """Whether this process has the lock now; the system gives it back when the process ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
