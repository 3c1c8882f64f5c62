"""The matcher's loop: what manager and last stage tell comes in, masks go out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future

import zmq
from llguidance import LLMatcher

from toka.messages import (
    Compile,
    Compiled,
    Constrain,
    GrammarFailed,
    Masks,
    Message,
    Sampled,
    StageHello,
    Stop,
)
from toka.sockets import parse, receive, send
from workers.endpoints import MANAGER, stage_name
from workers.matcher.grammars import Grammars
from workers.matcher.matching import Matching

log = logging.getLogger(__name__)

COMPILING_MS = 2
"""How often grammars that are being compiled are looked after."""


class Loop:
    def __init__(self, socket: zmq.Socket[bytes], grammars: Grammars, stages: Iterable[int]) -> None:
        """socket: a ROUTER, bound. stages: who gets masks."""
        self._socket, self._grammars = socket, grammars
        self._matching = Matching(grammars)
        self._stages = {stage_name(stage) for stage in stages}
        self._absent = set(self._stages)
        """Those that have not said hello: what is sent to them would be dropped."""
        self._held: list[Masks] = []
        self._compiling: dict[int, Future[LLMatcher]] = {}
        self._stopped = False

    def run(self) -> None:
        """Serve until the manager says Stop and the steps that it sent before have their masks."""
        while not self._stopped or self._held or self._matching.pending:
            self._socket.poll(COMPILING_MS if self._compiling else None)
            while (frames := receive(self._socket)) is not None:
                sender, *rest = frames
                self._take(sender, parse(rest))
            self._tell_compiled()
            for message in self._matching.advance():
                if isinstance(message, Masks):
                    self._held.append(message)
                else:
                    send(self._socket, message, [MANAGER])
            if not self._absent:
                self._give_masks()

    def _take(self, sender: bytes, message: Message | None) -> None:
        match message:
            case Sampled():
                self._matching.sampled(message)
            case Constrain():
                self._matching.constrain(message)
            case Compile():
                self._compiling[message.number] = self._grammars.of(message.grammar)
            case GrammarFailed():
                self._matching.answered(message)
            case StageHello():
                self._absent.discard(sender)
            case Stop():
                self._stopped = True
            case _ if message is not None:
                log.warning("message dropped: not for a matcher", extra={"message": type(message).__name__})

    def _tell_compiled(self) -> None:
        for number in [number for number, future in self._compiling.items() if future.done()]:
            error = self._compiling.pop(number).exception()
            send(self._socket, Compiled(number=number, error=str(error or "")), [MANAGER])

    def _give_masks(self) -> None:
        for masks in self._held:
            for stage in self._stages:
                send(self._socket, masks, [stage])
        self._held.clear()
