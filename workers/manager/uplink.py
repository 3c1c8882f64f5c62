"""The manager's side of the broker: joining, fencing, staying known."""

from __future__ import annotations

import logging
import secrets
import time

import zmq

from toka import sockets
from toka.messages import Fenced, JoinReplica, Message, ModelCard, Outputs, Pages, Pong, Refused, State
from workers.manager.state import State as ManagerState

log = logging.getLogger(__name__)

SILENCE_SECONDS = 1.0
"""Without word from the broker for this long, it may have been restarted: join again."""
REJOIN_SECONDS = 0.5
PUBLISH_SECONDS = 0.05
"""Between messages about pages that came and went."""
MESSAGES_AT_ONCE = 64
"""Messages taken in before the stages get their turn: thousands come at once, a fraction of a millisecond each."""


class Uplink:
    """A connection that joins the broker, and joins again whenever it may have forgotten this replica.

    Each incarnation of the replica is an epoch, drawn anew when the broker declares one over.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replica: str,
        card: ModelCard,
        state: ManagerState,
        keys: str = "",
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._keys = keys
        self._replica = replica
        self._card = card
        self._state = state
        self.credits = 2 * state.limits.max_seqs
        self._incarnation: int | None = None
        self._unknown = True
        """Whether a broker that has not been told of this replica was heard, or none was yet."""
        self._heard = self._joined = self._published = float("-inf")
        self._whole = True
        """Whether the broker has to be told of all pages anew."""
        self._connect()

    def _connect(self) -> None:
        self.epoch = secrets.randbits(63)
        identity = f"m-{self._replica}-{self.epoch:016x}".encode()
        self._connection = sockets.Connection(self._context, self._endpoint, identity, self._keys)
        self.socket = self._connection.socket

    def renew(self) -> None:
        """Begin another epoch; whatever the old one held must have been dropped."""
        self.close()
        self._connect()
        self.join()

    def close(self) -> None:
        self._connection.close()

    def join(self) -> None:
        """Tell the broker what this replica is and holds."""
        shards = [s for shards in self._state.shards.values() for s in shards.values()]
        self._joined = time.monotonic()
        self._unknown, self._whole = False, True
        self.send(
            JoinReplica(
                replica=self._replica,
                epoch=self.epoch,
                credits=self.credits,
                card=self._card,
                holds=[s.request for s in shards],
                holds_first=[s.first_sample for s in shards],
                holds_sequences=[s.unfinished for s in shards],
                holds_priorities=[s.priority for s in shards],
                holds_frontends=[s.frontend for s in shards],
            )
        )

    def publish(self) -> None:
        """Tell the broker, if it is there and not too often, which pages came and went; after a join, of all."""
        now = time.monotonic()
        if now - self._published < PUBLISH_SECONDS or self._unknown or now - self._heard >= SILENCE_SECONDS:
            return
        self._published = now
        inserted, evicted = self._state.pages.changes()
        if self._whole:
            inserted, evicted = self._state.pages.known(), []
        if self._whole or inserted or evicted:
            self.send(Pages(whole=self._whole, inserted=b"".join(inserted), evicted=b"".join(evicted)))
        self._whole = False

    def send(self, message: JoinReplica | Outputs | Pages | Pong | Refused) -> None:
        sockets.send(self.socket, message)

    def received(self) -> list[Message]:
        """The messages that wait, up to MESSAGES_AT_ONCE, except what keeps the connection itself going."""
        messages: list[Message] = []
        while len(messages) < MESSAGES_AT_ONCE and (frames := sockets.receive(self.socket)) is not None:
            message = sockets.parse(frames)
            if isinstance(message, State):
                self._note(message)
            elif isinstance(message, Fenced):
                if message.epoch == self.epoch:
                    messages.append(message)
            elif message is not None:
                messages.append(message)
        return messages

    def _note(self, state: State) -> None:
        self._heard = time.monotonic()
        self._unknown |= state.incarnation != self._incarnation
        self._incarnation = state.incarnation

    def keep(self) -> float:
        """Join where the broker is new or silent; seconds until this should be looked at again.

        Call between turns, when what `received` returned has been handled: what is held is told as it is then. While
        messages are unread the broker is not silent, and a shard among them would be left out: a restarted broker
        would declare it lost.
        """
        self._connection.keep()
        now = time.monotonic()
        if self._unknown:
            self.join()
        if now - self._heard < SILENCE_SECONDS:
            return SILENCE_SECONDS - (now - self._heard)
        if now - self._joined >= REJOIN_SECONDS and not self.socket.poll(0):
            self.join()
        return REJOIN_SECONDS
