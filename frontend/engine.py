"""The frontend's side of the broker: sends shards, takes in tokens, and makes good what got lost.

A position of a sample is taken once. Rows that overlap what is here are cut, a gap is asked for again
(Resume), and shards whose replica died are submitted again with the ids they have, so that their
streams go on where they were.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets

import zmq

from frontend.errors import ApiError
from frontend.generation import SHARD_SAMPLES, Call, Generation, Shard
from frontend.rows import Row, rows
from frontend.sample import Sample
from frontend.scores import ScoreRow
from toka.messages import (
    Accepted,
    Cancel,
    Finish,
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
    State,
)
from toka.page_keys import PromptKeys
from toka.sockets import Connection, Port, parse

log = logging.getLogger(__name__)

JOIN_SECONDS = 0.5
"""Between joins while no broker has answered."""
BEAT_SECONDS = 1.0
BROKER_SILENT_SECONDS = 2.0
QUIET_SECONDS = 5.0
"""A request that heard nothing for so long is asked for again, in case an answer was lost; then for twice ..."""
QUIET_MOST_SECONDS = 60.0
"""... as long each time, up to this."""
QUIET_WHOLE_SECONDS = 20.0
"""In place of QUIET_SECONDS for one that was accepted and whose tokens come many together: it is silent in between."""
ASKED_AT_ONCE = 1024
"""Requests asked for at one time: thousands that wait in a queue are silent, too."""
RESETTLED_SECONDS = 4.0
"""The same after the broker was restarted: by then it knows again which replica holds what."""
GAP_SECONDS = 2.0
"""Before a gap that was asked for is asked for again."""
RETRY_SECONDS = 1.0
SUBMITS_AT_ONCE = 64
"""Shards submitted before other tasks of the event loop get their turn."""


class Engine:
    """All that the frontend has in flight. `run` must be running."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], broker: str, keys: str = "") -> None:
        self.identity = b"f-" + secrets.token_bytes(8)
        self._connection = Connection(context, broker, self.identity, keys)
        self.state: State | None = None
        self.met = asyncio.Event()
        """Whether a broker has ever answered."""
        self.card: ModelCard | None = None
        """Of the replicas there are, or were last."""
        self._port = Port(self._connection.socket)
        self._generations: dict[bytes, Generation] = {}
        self._released: list[bytes] = []
        self._gaps: dict[tuple[bytes, int], float] = {}
        """When the gap of a sample was asked for."""
        self._prompt_keys = PromptKeys(page_size=1)
        self._pings: dict[int, asyncio.Future[Pong]] = {}
        self._nonces = itertools.count(secrets.randbits(32))
        self._state_at = 0.0

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._generations)

    @property
    def unavailable(self) -> str:
        """Why nothing can be served just now, in one sentence; empty where it can."""
        if self.state is None or self._now() - self._state_at > BROKER_SILENT_SECONDS:
            return "the broker does not answer"
        if self.state.draining:
            return "the server is shutting down"
        return "" if self.state.replicas else "no replica is ready"

    async def run(self) -> None:
        """Serve until cancelled."""
        beat = asyncio.create_task(self._beat())
        try:
            async for frames in self._port.messages():
                message = parse(frames)
                if message is not None:
                    self._take(message)
        finally:
            beat.cancel()
            self._connection.close()

    async def submit(self, call: Call) -> None:
        """Send all of a call. It has to be closed, whatever comes of it."""
        sent = 0
        share = min(SHARD_SAMPLES, (self.state and self.state.share) or SHARD_SAMPLES)
        for generation in call.generations:
            generation.divide(share)
        for generation in call.generations:
            self._generations[generation.id] = generation
            self._hear(generation)
            for shard in generation.shards:
                if not shard.unfinished:
                    break  # The call was aborted meanwhile.
                self._submit(generation, shard)
                sent += 1
                if sent % SUBMITS_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def close(self, call: Call) -> None:
        """Nobody waits for the call any more: drop what still runs."""
        for generation in call.generations:
            if generation.id in self._generations:
                self._port.send(Cancel(request=generation.id, samples=[]))
                self._release(generation)

    async def ping(self, seconds: float) -> Pong | None:
        """The first manager's answer, from its scheduling loop; None where none comes in time."""
        nonce = next(self._nonces)
        self._pings[nonce] = asyncio.get_running_loop().create_future()
        try:
            self._port.send(Ping(nonce=nonce, frontend=self.identity))
            return await asyncio.wait_for(self._pings[nonce], seconds)
        except TimeoutError:
            return None
        finally:
            del self._pings[nonce]

    # --- What comes in

    def _take(self, message: Message) -> None:
        match message:
            case Outputs():
                for row in rows(message.payload):
                    if isinstance(row, ScoreRow):
                        self._scored(row)
                    else:
                        self._row(row)
            case Accepted():
                for generation, shard in self._shards([message.request], [message.first_sample]):
                    generation.call.accept(shard)
                    self._hear(generation)
            case State():
                self._state(message)
            case Refused():
                for generation, shard in self._shards([message.request], [message.first_sample]):
                    self._refused(generation, shard, message)
            case Lost():
                for generation, shard in self._shards(message.requests, message.first_samples):
                    self._submit(generation, shard)
            case Pong():
                answer = self._pings.get(message.nonce)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                log.warning("message dropped: not for a frontend", extra={"kind": type(message).__name__})

    def _shards(self, requests: list[bytes], firsts: list[int]) -> list[tuple[Generation, Shard]]:
        """Those of the named shards that are waited for."""
        found = []
        for request, first in zip(requests, firsts):
            generation = self._generations.get(request)
            shard = generation.shard(first) if generation else None
            if generation and shard and shard.unfinished:
                found.append((generation, shard))
        return found

    def _state(self, state: State) -> None:
        known, self.state, self._state_at = self.state, state, self._now()
        self.met.set()
        self.card = state.card or self.card
        if known is not None and known.incarnation != state.incarnation:
            log.info("the broker was restarted", extra={"requests": len(self)})
            self._join()
            for generation in self._generations.values():
                self._hear(generation, RESETTLED_SECONDS)

    def _row(self, row: Row) -> None:
        generation = self._generations.get(row.request)
        if generation is None or not 0 <= row.sample < len(generation.samples):
            return
        sample = generation.samples[row.sample]
        if sample.finish:
            return
        over = len(sample.ids) - row.first
        if over < 0:
            self._gap(generation, sample)
            return
        if over > len(row.ids) or (over == len(row.ids) and not row.finish):
            return
        if row.finish == Finish.ABORT:
            generation.call.fail(ApiError(500, "the engine gave the request up"))
            return
        if generation.unscored and row.sample < generation.share:
            # What comes before tokens of the first shard was lost.
            self._gap(generation, sample)
            return
        if self._gaps:
            self._gaps.pop((generation.id, sample.number), None)
        if not row.first and not row.sample:
            generation.cached = row.cached
        if generation.call.pending:
            generation.call.accept(generation.shards[row.sample // generation.share])
        self._hear(generation)
        self._add(generation, sample, row, over)

    def _add(self, generation: Generation, sample: Sample, row: Row, over: int) -> None:
        sample.add(row.ids[over:] if over else row.ids, row.finish, row.logprobs[over:])
        call = generation.call
        if not generation.unscored:
            call.change(sample)
        if sample.finish:
            if not row.finish:
                self._port.send(Cancel(request=generation.id, samples=[sample.number]))
            call.finish(generation)
            if not generation.left:
                self._release(generation)

    def _scored(self, row: ScoreRow) -> None:
        generation = self._generations.get(row.request)
        scores = generation.scores if generation else None
        if generation is None or scores is None or scores.complete or not scores.fits(row):
            return
        if row.first > scores.have:
            self._gap(generation, generation.shards[0].unfinished[0])
            return
        scores.take(row)
        generation.call.accept(generation.shards[0])
        self._hear(generation)
        if scores.complete:
            # Those of other shards that have come before.
            for sample in generation.samples:
                if sample.ids:
                    generation.call.change(sample)

    def _gap(self, generation: Generation, sample: Sample) -> None:
        key, now = (generation.id, sample.number), self._now()
        if now - self._gaps.get(key, -GAP_SECONDS) >= GAP_SECONDS:
            self._gaps[key] = now
            self._resume(generation, sample)

    def _refused(self, generation: Generation, shard: Shard, refused: Refused) -> None:
        if shard.accepted and refused.status in (429, 503):
            # It was accepted once, and its client has been told: it waits on.
            self._submit_later(generation, shard, refused.retry_after or RETRY_SECONDS)
        else:
            code = "queue_full" if refused.status == 429 else None
            error = ApiError(refused.status, refused.reason, code=code, retry_after=refused.retry_after)
            generation.call.fail(error)

    # --- What goes out

    def _submit(self, generation: Generation, shard: Shard) -> None:
        self._hear(generation)
        if not self._port.send(generation.submit(shard, self.identity, self._page_hashes(generation))):
            self._submit_later(generation, shard, RETRY_SECONDS)

    def _page_hashes(self, generation: Generation) -> bytes:
        """Of its prompt, where there is more than one replica that the broker could choose by them."""
        if self.card is None or self.state is None or self.state.replicas < 2:
            return b""
        if self._prompt_keys.page_size != self.card.page_size:
            self._prompt_keys = PromptKeys(self.card.page_size)
        return b"".join(self._prompt_keys.of(generation.prompt))

    def _submit_later(self, generation: Generation, shard: Shard, seconds: float) -> None:
        def submit() -> None:
            if generation.id in self._generations and shard.unfinished:
                self._submit(generation, shard)

        asyncio.get_running_loop().call_later(seconds, submit)

    def _resume(self, generation: Generation, sample: Sample) -> None:
        scored = generation.scores.have if generation.scores else 0
        self._port.send(Resume(request=generation.id, sample=sample.number, have=len(sample.ids), scored=scored))

    def _release(self, generation: Generation) -> None:
        del self._generations[generation.id]
        for sample in generation.samples if self._gaps else ():
            self._gaps.pop((generation.id, sample.number), None)
        if not self._released:
            asyncio.get_running_loop().call_soon(self._send_released)
        self._released.append(generation.id)

    def _send_released(self) -> None:
        self._port.send(Release(requests=self._released))
        self._released = []

    def _join(self) -> None:
        join = JoinFrontend(holds=[], holds_first=[])
        for generation in self._generations.values():
            for shard in generation.shards:
                if shard.unfinished:
                    join.holds.append(generation.id)
                    join.holds_first.append(shard.first)
        self._port.send(join)

    async def _beat(self) -> None:
        while True:
            self._connection.keep()
            self._join()
            if self.state is None:
                await asyncio.sleep(JOIN_SECONDS)
                continue
            self._ask_again()
            await asyncio.sleep(BEAT_SECONDS)

    def _ask_again(self) -> None:
        """Ask for what should have come by now: silence may mean that a last message was lost."""
        now = self._now()
        if now - self._state_at > BROKER_SILENT_SECONDS:
            return
        quiet = [each for each in self._generations.values() if now - each.heard >= each.quiet]
        for generation in quiet[:ASKED_AT_ONCE]:
            self._hear(generation, min(2 * generation.quiet, QUIET_MOST_SECONDS))
            for shard in generation.shards:
                if not shard.accepted:
                    self._submit(generation, shard)
                for sample in shard.unfinished:
                    self._resume(generation, sample)

    def _hear(self, generation: Generation, quiet: float = 0.0) -> None:
        """Something came for it; 0: be quiet for as long as such a request may be."""
        whole = generation.delivery > 1 and not generation.call.pending
        generation.heard = self._now()
        generation.quiet = quiet or (QUIET_WHOLE_SECONDS if whole else QUIET_SECONDS)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
