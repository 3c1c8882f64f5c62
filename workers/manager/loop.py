"""The manager's loop: one thread around a zmq.Poller, paced by the stages."""

from __future__ import annotations

import faulthandler
import logging
import signal
import socket
import time
from collections import deque

import zmq

from toka.messages import (
    Cancel,
    Compiled,
    Fenced,
    GrammarFailed,
    Message,
    MessageError,
    Ping,
    Plan,
    Pong,
    Refused,
    Release,
    Resume,
    StepResult,
    Stop,
    Submit,
    Work,
    decode,
)
from toka.trace import OFF, QUEUED, Recorder
from workers.manager.matcher import Matcher
from workers.manager.pacing import Pacing
from workers.manager.planner import Sent
from workers.manager.scheduler import Scheduler
from workers.manager.sequences import Shard
from workers.manager.stages import Stages
from workers.manager.uplink import Uplink

log = logging.getLogger(__name__)

HUNG_SECONDS = 30.0
"""The loop turns at least every second, whatever the stages do. Where it has not for so long, the process ends
with a traceback and a failure, and is restarted with its replica."""
WATCH_SECONDS = 1.0
"""How often the timer for that is set anew: it costs a thread."""


class Loop:
    def __init__(
        self,
        scheduler: Scheduler,
        stages: Stages,
        matcher: Matcher,
        uplink: Uplink,
        pacing: Pacing,
        drain_seconds: float,
        trace: Recorder = OFF,
    ) -> None:
        self._scheduler = scheduler
        self._stages = stages
        self._matcher = matcher
        self._uplink = uplink
        self._trace = trace
        self._pacing = pacing
        self._drain_seconds = drain_seconds
        self._sent: deque[Sent] = deque()
        """Plans whose results have not been accounted, oldest first ..."""
        self._arrived: deque[StepResult] = deque()
        """... and the results of the first of them, where they are here already."""
        self._drain_until = float("inf")
        self._watched = float("-inf")

    def run(self) -> None:
        """Serve until SIGTERM and, after it, until what runs has finished or its time is over."""
        wake, _signalled = _wake_on_sigterm()
        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        poller.register(self._stages.results, zmq.POLLIN)
        poller.register(self._matcher.socket, zmq.POLLIN)
        while not self._drained():
            self._watch()
            poller.register(self._uplink.socket, zmq.POLLIN)
            wait = min(self._uplink.keep(), self._drain_until - time.monotonic())
            with self._trace.span("wait"):
                ready = dict(poller.poll(max(0, int(wait * 1000))))
            if wake.fileno() in ready:
                self._begin_drain(wake)
            with self._trace.span("results"):
                self._arrived.extend(self._stages.arrived())
            before = self._uplink.socket
            with self._trace.span("messages"):
                for message in self._uplink.received():
                    self._handle(message)
                for message in self._matcher.arrived():
                    self._hear(message)
            if self._uplink.socket is not before:
                poller.unregister(before)
            self._turn()
            self._uplink.publish()
        faulthandler.cancel_dump_traceback_later()
        self._stages.send(Stop())
        self._matcher.send(Stop())

    def _watch(self) -> None:
        if (now := time.monotonic()) - self._watched >= WATCH_SECONDS:
            self._watched = now
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)

    def _begin_drain(self, wake: socket.socket) -> None:
        wake.recv(4096)
        if self._drain_until == float("inf"):
            log.info("draining", extra={"sequences": self._scheduler.state.live})
            self._drain_until = time.monotonic() + self._drain_seconds
            self._uplink.credits = 0
            self._uplink.join()

    def _drained(self) -> bool:
        if self._drain_until == float("inf"):
            return False
        return not self._scheduler.state.live or time.monotonic() >= self._drain_until

    def _turn(self) -> None:
        """Send plans until the stages have enough of them, keeping the books in between or later."""
        while True:
            queued = len(self._sent) - len(self._arrived)
            self._trace.count(QUEUED, plans=queued)
            hurry = bool(self._arrived) and self._pacing.hurry(queued)
            if not hurry:
                self._account()
            if not self._pacing.wants_plan(queued):
                break
            admit = self._pacing.admit(hurry)
            planned = self._scheduler.plan(admit)
            if planned is not None:
                self._send(*planned, hurry)
                self._pacing.planned(len(self._arrived), admit)
                if self._trace.on:
                    self._count(hurry)
            elif hurry:
                self._account()
            else:
                break
        self._flush()

    def _send(self, plan: Plan, sent: Sent, hurried: bool) -> None:
        size = {"rows": len(plan.row_slots), "tokens": len(plan.tokens)}
        with self._trace.span("send", step=plan.step, hurried=hurried, **size):
            if (constrain := self._scheduler.constrain(plan)) is not None:
                self._matcher.send(constrain)
            self._stages.send(plan)
        self._sent.append(sent)

    def _account(self) -> None:
        if self._arrived:
            with self._trace.span("account", results=len(self._arrived)):
                while self._arrived:
                    self._scheduler.result(self._sent.popleft(), self._arrived.popleft())
        self._flush()

    def _flush(self) -> None:
        with self._trace.span("flush"):
            for message in self._scheduler.outputs(self._uplink.epoch):
                self._uplink.send(message)

    def _count(self, hurried: bool) -> None:
        state, pacing = self._scheduler.state, self._pacing
        self._trace.count("sequences", running=state.running, waiting=state.live - state.running)
        self._trace.count("pages", held=state.pages.held)
        self._trace.count("pacing", hurry=hurried)
        self._trace.count("postponed", admissions=pacing.admissions_postponed, results=pacing.results_postponed)
        if len(self._stages.busy) > 1:
            self._trace.count("busy", **{f"stage {number}": share for number, share in enumerate(self._stages.busy)})

    def _handle(self, message: Message) -> None:
        match message:
            case Ping():
                self._answer(message)
            case Submit():
                self._submit(message)
            case Cancel():
                self._scheduler.cancel(message.request, message.samples)
            case Release():
                for request in message.requests:
                    self._scheduler.release(request)
            case Resume():
                if not self._scheduler.resume(message.request, message.sample, message.have, message.scored):
                    # It never came here, or was dropped: the frontend has to submit it again.
                    self._refuse(b"", message.request, message.sample, 1, 503, "the request is not known here")
            case Fenced():
                log.warning("declared dead by the broker; starting over", extra={"epoch": message.epoch})
                self._scheduler.drop_everything()
                self._uplink.renew()
            case _:
                log.warning("message dropped", extra={"type": type(message).__name__})

    def _hear(self, message: Message) -> None:
        """What the matcher says."""
        if isinstance(message, Compiled):
            self._give_up(self._scheduler.compiled(message), message.error)
        elif isinstance(message, GrammarFailed):
            self._give_up(self._scheduler.grammar_failed(message.slot), message.reason)
            self._matcher.send(message)

    def _answer(self, ping: Ping) -> None:
        state = self._scheduler.state
        self._uplink.send(
            Pong(
                nonce=ping.nonce,
                frontend=ping.frontend,
                epoch=self._uplink.epoch,
                running=state.running,
                waiting=state.live - state.running,
                pages_used=state.pages.held,
                pages=state.limits.pages,
            )
        )

    def _submit(self, submit: Submit) -> None:
        try:
            work = decode(submit.payload)
            reason = self._scheduler.check(work) if isinstance(work, Work) else "the payload is not a Work message"
        except MessageError as error:
            work, reason = None, str(error)
        if reason or not isinstance(work, Work):
            name = submit.frontend, submit.request, submit.first_sample
            self._refuse(*name, submit.sequences, 400, reason)
            return
        compile = self._scheduler.submit(submit, work)
        if compile is not None:
            self._matcher.send(compile)

    def _give_up(self, shard: Shard | None, reason: str) -> None:
        if shard is not None:
            name = shard.frontend, shard.request, shard.first_sample
            self._refuse(*name, len(shard.sequences), 400, reason)

    def _refuse(self, frontend: bytes, request: bytes, sample: int, sequences: int, status: int, reason: str) -> None:
        self._uplink.send(
            Refused(
                frontend=frontend,
                request=request,
                first_sample=sample,
                sequences=sequences,
                status=status,
                reason=reason,
                retry_after=0,
            )
        )


def _wake_on_sigterm() -> tuple[socket.socket, socket.socket]:
    """Two ends of a pipe whose first becomes readable on SIGTERM, for the poller; keep both."""
    wake, signalled = socket.socketpair()
    for end in (wake, signalled):
        end.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    return wake, signalled
