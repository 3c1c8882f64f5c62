"""A broker and a manager in one thread, as a frontend sees them over a real socket.

The tokens of a sample are a function of (seed, sample, position), so that what a frontend makes of them
can be foretold. A test can have it refuse, be slow, lose messages or shards, send rows twice, restart.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from toka.messages import (
    Accepted,
    Cancel,
    Finish,
    Frame,
    JoinFrontend,
    Lost,
    Message,
    ModelCard,
    Outputs,
    Ping,
    Pong,
    Refused,
    Release,
    Resume,
    SamplingParams,
    Scores,
    State,
    Submit,
    Tokens,
    Work,
    decode,
    encode,
)
from toka.sockets import receive, send

TokenOf = Callable[[int, int, int], int]
"""(seed, sample, position) to a token id."""


def some_token(seed: int, sample: int, position: int) -> int:
    """Any of the demo vocabulary's ids that stands for text."""
    return 1000 + (seed * 7919 + sample * 104_729 + position * 1_299_709) % 40_000


def script(ids: list[int], then: int = 2) -> TokenOf:
    """The same ids in every sample, and `then` behind them."""
    return lambda seed, sample, position: ids[position] if position < len(ids) else then


CARD = ModelCard(
    name="SmolLM2-135M-Instruct",
    vocab_size=49_152,
    context_length=8192,
    kv_cache_tokens=6000,
    page_size=16,
    eos_token_ids=[2],
    max_logprobs=20,
)


@dataclass
class Running:
    """A sample that is being generated."""

    frontend: bytes
    request: bytes
    sample: int
    params: SamplingParams
    ids: list[int] = field(default_factory=list)
    sent: int = 0
    finish: Finish = Finish.NONE


@dataclass
class Scoring:
    """A prompt whose log-probabilities are found; `done` of its ids have theirs."""

    frontend: bytes
    request: bytes
    prompt: list[int]
    likely: int
    done: int = 0

    @property
    def complete(self) -> bool:
        return self.done == len(self.prompt) - 1


@dataclass
class EnginePeer:
    token_of: TokenOf = some_token
    step_seconds: float = 0.0
    chunk: int = 1
    """Tokens of a sample in one row, and ids of a prompt whose log-probabilities come together."""
    card: ModelCard | None = CARD
    replicas: int = 1
    refusal: tuple[int, str, int] | None = None
    """Status, reason and Retry-After of the answer to every Submit."""
    paused: bool = False
    """Whether work is accepted and not run."""
    deaf: bool = False
    """Whether nothing is answered, as by a broker that hangs."""
    drop: int = 0
    """So many of the next Outputs are lost on their way."""
    repeat: int = 0
    """Every row begins so many tokens before what is new."""
    cached: int = 0
    port: int = 0
    """0: any free one."""

    def __post_init__(self) -> None:
        self.seen: list[Message] = []
        self.endpoint = ""
        self._running: dict[tuple[bytes, int], Running] = {}
        self._scoring: dict[bytes, Scoring] = {}
        self._frontends: set[bytes] = set()
        self._commands: deque[Callable[[], None]] = deque()
        self._incarnation = 1
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> EnginePeer:
        self._thread.start()
        assert self._bound.wait(5)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def of(self, kind: type[Any]) -> list[Any]:
        """The messages of a kind that came, in order."""
        return [message for message in list(self.seen) if isinstance(message, kind)]

    def wait_for(self, kind: type[Any], count: int = 1, seconds: float = 10.0) -> list[Any]:
        end = time.monotonic() + seconds
        while len(self.of(kind)) < count:
            assert time.monotonic() < end, f"{count} {kind.__name__} did not come"
            time.sleep(0.005)
        return self.of(kind)

    def reset(self) -> None:
        """Behave by default again, and drop all that runs."""
        for each in dataclasses.fields(self):
            setattr(self, each.name, each.default)
        done = threading.Event()
        self._commands += [self._running.clear, self._scoring.clear, done.set]
        assert done.wait(5)

    # --- Orders, obeyed between two steps

    def lose_all(self) -> None:
        """The replica dies: its shards are lost."""
        self._commands.append(self._lose)

    def restart(self) -> None:
        """The broker is another incarnation, and no replica holds anything."""

        def restart() -> None:
            self._incarnation += 1
            self._running.clear()
            self._scoring.clear()
            self._frontends.clear()

        self._commands.append(restart)

    def abort_all(self) -> None:
        def abort() -> None:
            for each in self._running.values():
                each.finish = Finish.ABORT
            self._send_rows(list(self._running.values()))

        self._commands.append(abort)

    def send_raw(self, frames: list[bytes]) -> None:
        """To every frontend."""

        def raw() -> None:
            for identity in self._frontends:
                self._socket.send_multipart([identity, *frames])

        self._commands.append(raw)

    # --- The thread

    def _loop(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.endpoint = f"tcp://127.0.0.1:{self.port or '*'}"
        self._socket.bind(self.endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bound.set()
        told = stepped = 0.0
        while not self._stop.is_set():
            self._socket.poll(1 if self._running or self._commands else 5)
            while (frames := receive(self._socket)) is not None:
                self._take(frames[0], decode(frames[1:]))
            while self._commands:
                self._commands.popleft()()
            now = time.monotonic()
            if now - told >= 0.25 and not self.deaf:
                told = now
                for identity in self._frontends:
                    self._tell(identity, self._state())
            if now - stepped >= self.step_seconds and not self.paused:
                stepped = now
                self._step()
        self._socket.close()
        context.term()

    def _tell(self, identity: bytes, message: Message) -> None:
        send(self._socket, message, [identity])

    def _state(self) -> State:
        return State(
            incarnation=self._incarnation,
            replicas=self.replicas,
            queued=0,
            card=self.card if self.replicas else None,
            draining=False,
        )

    def _take(self, sender: bytes, message: Message) -> None:
        self.seen.append(message)
        if self.deaf:
            return
        match message:
            case JoinFrontend():
                self._join(sender, message)
            case Submit():
                self._submit(sender, message)
            case Cancel():
                for key in [key for key in self._running if key[0] == message.request]:
                    if not message.samples or key[1] in message.samples:
                        del self._running[key]
            case Resume():
                running = self._running.get((message.request, message.sample))
                if running is not None:
                    running.sent = message.have
                    scoring = self._scoring.get(message.request)
                    if scoring is not None and scoring.done > message.scored:
                        self._send_scores(scoring, message.scored)
                    self._send_rows([running])
            case Release():
                for request in message.requests:
                    self._scoring.pop(request, None)
                for key in [key for key in self._running if key[0] in message.requests]:
                    del self._running[key]
            case Ping():
                pong = Pong(
                    nonce=message.nonce, frontend=sender, epoch=1, running=0, waiting=0, pages_used=0, pages=375
                )
                if self.replicas and not self.paused:
                    self._tell(sender, pong)

    def _join(self, sender: bytes, message: JoinFrontend) -> None:
        if sender in self._frontends:
            return
        self._frontends.add(sender)
        self._tell(sender, self._state())
        if message.holds:
            self._tell(sender, Lost(requests=message.holds, first_samples=message.holds_first))

    def _submit(self, sender: bytes, submit: Submit) -> None:
        if self.refusal:
            status, reason, retry_after = self.refusal
            refused = Refused(
                frontend=sender,
                request=submit.request,
                first_sample=submit.first_sample,
                sequences=submit.sequences,
                status=status,
                reason=reason,
                retry_after=retry_after,
            )
            self._tell(sender, refused)
            return
        work = decode(submit.payload)
        assert isinstance(work, Work) and len(work.samples) == submit.sequences
        self._tell(sender, Accepted(request=submit.request, first_sample=submit.first_sample))
        if work.params.prompt_logprobs >= 0:
            about = work.prompt.tolist(), work.params.prompt_logprobs
            self._scoring[submit.request] = Scoring(sender, submit.request, *about)
        outputs = work.outputs.tolist()
        for sample, count in zip(work.samples, work.output_counts):
            running = Running(sender, submit.request, sample, work.params, outputs[:count], count)
            self._running[submit.request, sample] = running
            del outputs[:count]

    def _step(self) -> None:
        for scoring in self._scoring.values():
            if not scoring.complete:
                first, scoring.done = scoring.done, min(scoring.done + self.chunk, len(scoring.prompt) - 1)
                self._send_scores(scoring, first)
        unscored = {request for request, each in self._scoring.items() if not each.complete}
        advanced = [each for each in self._running.values() if not each.finish and each.request not in unscored]
        for each in advanced:
            for _ in range(self.chunk):
                if not each.finish:
                    self._advance(each)
        if advanced:
            self._send_rows(advanced)

    def _advance(self, each: Running) -> None:
        if not each.params.max_tokens:
            each.finish = Finish.LENGTH
            return
        token = self.token_of(each.params.seed, each.sample, len(each.ids))
        each.ids.append(token)
        stops = [*(CARD.eos_token_ids if not each.params.ignore_eos else []), *each.params.stop_token_ids]
        if token in stops and len(each.ids) > each.params.min_tokens:
            each.finish = Finish.STOP
        elif len(each.ids) >= each.params.max_tokens:
            each.finish = Finish.LENGTH

    def _send_rows(self, rows: list[Running]) -> None:
        by_frontend: dict[bytes, list[Running]] = {}
        for each in rows:
            by_frontend.setdefault(each.frontend, []).append(each)
        for frontend, of_it in by_frontend.items():
            firsts = [max(0, each.sent - self.repeat) for each in of_it]
            payload = encode(_tokens(of_it, firsts, self.cached))
            for each in of_it:
                each.sent = len(each.ids)
            self._send_outputs(frontend, payload)

    def _send_scores(self, scoring: Scoring, first: int) -> None:
        self._send_outputs(scoring.frontend, encode(_scores(scoring, max(0, first - self.repeat))))

    def _send_outputs(self, frontend: bytes, payload: list[Frame]) -> None:
        if self.drop:
            self.drop -= 1
            return
        outputs = Outputs(
            frontend=frontend, epoch=1, finished=[], finished_first=[], finished_sequences=[], payload=payload
        )
        self._tell(frontend, outputs)

    def _lose(self) -> None:
        lost: dict[bytes, list[tuple[bytes, int]]] = {}
        for each in self._running.values():
            shard = (each.request, each.sample // 64 * 64)
            if shard not in lost.setdefault(each.frontend, []):
                lost[each.frontend].append(shard)
        self._running.clear()
        self._scoring.clear()
        for frontend, shards in lost.items():
            self._tell(frontend, Lost(requests=[r for r, _ in shards], first_samples=[f for _, f in shards]))


def logprob_of(token: int, rank: int = 0) -> float:
    """What the peer claims of a token, and of the `rank`-th likeliest one after it."""
    return -0.5 - rank - (token % 8) / 8


def _scores(scoring: Scoring, first: int) -> Scores:
    """Of the ids from place `first` on; the likely ones are those behind an id in the vocabulary, without itself."""
    ids = scoring.prompt[1 + first : 1 + scoring.done]
    ranks = range(scoring.likely)
    return Scores(
        requests=scoring.request,
        first=np.array([first], dtype=np.int32),
        counts=np.array([len(ids)], dtype=np.int32),
        logprobs=np.array([scoring.likely], dtype=np.int32),
        chosen=np.array([logprob_of(token) for token in ids], dtype=np.float32),
        top_ids=np.array([token + 1 + rank for token in ids for rank in ranks], dtype=np.int32),
        top_values=np.array([logprob_of(token, rank) / 2 for token in ids for rank in ranks], dtype=np.float32),
    )


def _tokens(rows: list[Running], firsts: list[int], cached: int) -> Tokens:
    runs = [each.ids[first:] for each, first in zip(rows, firsts)]
    chosen: list[float] = []
    top_ids: list[int] = []
    top_values: list[float] = []
    for each, run in zip(rows, runs):
        for token in run if each.params.logprobs >= 0 else ():
            chosen.append(logprob_of(token))
            top_ids += [token + rank for rank in range(each.params.logprobs)]
            top_values += [logprob_of(token, rank) for rank in range(each.params.logprobs)]
    return Tokens(
        requests=b"".join(each.request for each in rows),
        samples=np.array([each.sample for each in rows], dtype=np.int32),
        first=np.array(firsts, dtype=np.int32),
        counts=np.array([len(run) for run in runs], dtype=np.int32),
        finish=np.array([each.finish for each in rows], dtype=np.uint8),
        cached=np.full(len(rows), cached, dtype=np.int32),
        logprobs=np.array([each.params.logprobs for each in rows], dtype=np.int32),
        tokens=np.array([token for run in runs for token in run], dtype=np.int32),
        chosen=np.array(chosen, dtype=np.float32),
        top_ids=np.array(top_ids, dtype=np.int32),
        top_values=np.array(top_values, dtype=np.float32),
    )
