"""Toka and its client behind a thread, for programs that have an event loop of their own or none.

The thread starts Toka as a child process (which ends with it), keeps the connections, and takes requests from any
thread. Nothing here touches the program's signals, its logging or its own event loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec
import uvloop

from toka.client import OTHER_FILES, Answer, Client
from toka.config import Config
from toka.display import Display
from toka.outputs import Output
from toka.private import END_SECONDS, PrivateServer
from toka.process import raise_file_limit

SEQUENCES = 8
"""Samples that a call may have under way, for each request that it may have."""
ABORT_SECONDS = 0.05
"""Between two abortions of all, as long as requests are still on their way to the server."""
JOIN_SECONDS = END_SECONDS + 5.0


@dataclass(slots=True)
class Request:
    output: Output
    """What the answer goes into."""
    path: str
    body: bytes | Exception
    """What there is to post, or why it cannot be."""
    samples: int


Done = tuple[Output, Answer | Exception]
Put = Callable[[Done | RuntimeError], None]


class Run:
    """One call: its requests are drawn one by one, so many are under way, and what is done comes through `put`.

    `put` is called in the background's thread; `name` is the request_id of all requests. Use as a context manager:
    at its end what is under way is dropped.
    """

    def __init__(self, background: Background, name: str, requests: Iterator[Request], put: Put) -> None:
        self._background, self.name, self._requests, self.put = background, name, requests, put
        self._held: Request | None = None
        self._samples: dict[int, int] = {}
        """Of the requests under way, by their outputs' index."""
        self._total = 0
        self.tasks: set[asyncio.Task[None]] = set()
        """Of the background's thread alone."""
        self.aborted = False
        """Nothing more is sent."""

    def __enter__(self) -> Self:
        self._background.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.drop(self)

    def refill(self) -> int:
        """Send what there is room for; how many requests are under way."""
        new: list[Request] = []
        while not self.aborted and (request := self._held or next(self._requests, None)):
            self._held = request
            most = self._background.window
            if self._samples and (len(self._samples) >= most or self._total + request.samples > most * SEQUENCES):
                break
            self._held = None
            self._samples[request.output.index] = request.samples
            self._total += request.samples
            new.append(request)
        if new:
            self._background.send(self, new)
        return len(self._samples)

    def take(self, done: Done | RuntimeError) -> Done:
        """Account for what came through `put`. Raises it where it says that nothing more will come."""
        if isinstance(done, RuntimeError):
            raise done
        self._total -= self._samples.pop(done[0].index)
        return done


class Background:
    """RuntimeError, in one sentence, where Toka does not start. It lives until `close`.

    `window`: requests that a call may have under way.
    """

    def __init__(self, config: Config, display: Display, module: str) -> None:
        self.window = config.batch_items * config.dp_size
        self._config, self._display, self._module = config, display, module
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._runs: set[Run] = set()
        self._over: str | None = None
        """Why nothing more is answered."""
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stop = asyncio.Event()
        self._started: Future[None] = Future()
        raise_file_limit(self.window + 2 * OTHER_FILES)
        # A daemon: at the program's end `close` is called when threads that are none have been waited for.
        self._thread = threading.Thread(target=self._main, name="toka", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    # --- From any thread

    def add(self, run: Run) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this LLM belongs to the process that this one was forked from")
        with self._lock:
            if self._over is not None:
                raise RuntimeError(self._over)
            self._runs.add(run)

    def drop(self, run: Run) -> None:
        with self._lock:
            self._runs.discard(run)
            self._call(self._cancel, run)

    def send(self, run: Run, requests: Sequence[Request]) -> None:
        with self._lock:
            self._call(self._send, run, requests)

    def abort(self) -> None:
        """End all requests with what they have; those not sent yet are not sent."""
        with self._lock:
            runs = list(self._runs)
            for run in runs:
                run.aborted = True
            self._call(lambda: self._loop.create_task(self._abort(runs)))

    def close(self) -> None:
        """End Toka and the thread, as often as it is called; calls under way raise RuntimeError."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._call(self._stop.set)
        # The collector of garbage may call this in the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Have it called in the thread, unless that has ended."""
        if self._over is None:
            self._loop.call_soon_threadsafe(function, *args)

    # --- In the thread

    def _main(self) -> None:
        why = "the LLM is closed"
        try:
            why = self._runner.run(self._serve()) or why
        except BaseException as error:
            why = f"{error or type(error).__name__}"
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            with self._lock:
                self._over = why
                runs, self._runs = self._runs, set()
            for run in runs:
                run.put(RuntimeError(why))
            self._runner.close()

    async def _serve(self) -> str | None:
        """Serve until told to stop; why Toka has ended, where it did so by itself."""
        server = PrivateServer(self._config, self._display, self._module)
        stopped = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(server.ended())
        starting = asyncio.create_task(server.ready())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise RuntimeError("the LLM was closed before it had started")
            async with Client(starting.result()) as self._client:
                self._started.set_result(None)
                await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
                await self._cancel_all()
            return ended.result() if ended.done() else None
        finally:
            for task in (stopped, ended, starting):
                task.cancel()
            await server.stop()

    def _send(self, run: Run, requests: Sequence[Request]) -> None:
        for request in requests:
            task = self._loop.create_task(self._answer(run, request))
            run.tasks.add(task)
            task.add_done_callback(run.tasks.discard)

    async def _answer(self, run: Run, request: Request) -> None:
        answer: Answer | Exception
        try:
            if isinstance(request.body, Exception):
                answer = request.body
            else:
                answer = await self._client.post(request.path, request.body)
        except Exception as error:
            answer = error
        run.put((request.output, answer))

    def _cancel(self, run: Run) -> None:
        for task in run.tasks:
            task.cancel()

    async def _cancel_all(self) -> None:
        with self._lock:
            tasks = [task for run in self._runs for task in run.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _abort(self, runs: Sequence[Run]) -> None:
        while left := [run for run in runs if run.tasks]:
            for run in left:
                await self._client.post_everywhere("/v1/abort", msgspec.json.encode({"request_id": run.name}))
            await asyncio.sleep(ABORT_SECONDS)


def putting(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Done | RuntimeError]) -> Put:
    """A `put` for a coroutine of `loop`, of which nobody knows whether it is still there."""

    def put(done: Done | RuntimeError) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(queue.put_nowait, done)

    return put
