"""What samples with a grammar may be, as the matcher tells the stage that draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zmq
from numpy.typing import NDArray

from toka.config import Config
from toka.messages import Int32, Masks, Sampled, StageHello
from toka.sockets import open_socket, parse, prepare, send
from workers import endpoints

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Matcher(Protocol):
    def masks(self, step: int) -> Bytes:
        """Those of a step's constrained samples, waited for, one after another; as in the message Masks."""
        ...

    def sampled(self, step: int, slots: Int32, tokens: Int32) -> None:
        """Tell what these samples were given. May be called from another thread than `masks`."""
        ...


class ZmqMatcher:
    """The matcher of this replica. ValueError for a bad key file."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: Config, stage: int) -> None:
        self._masks = open_socket(context, zmq.DEALER, endpoints.stage_name(stage))
        self._sampled = open_socket(context, zmq.DEALER)
        endpoint = endpoints.matcher(config)
        for socket in (self._masks, self._sampled):
            prepare(socket, endpoint, config.keys)
            socket.connect(endpoint)
        send(self._masks, StageHello(stage=stage, settings={}))
        self._early: dict[int, Bytes] = {}
        """Masks of steps that were not asked for yet."""

    def masks(self, step: int) -> Bytes:
        while step not in self._early:
            message = parse(self._masks.recv_multipart())
            if isinstance(message, Masks):
                self._early[message.step] = message.bits
        return self._early.pop(step)

    def sampled(self, step: int, slots: Int32, tokens: Int32) -> None:
        send(self._sampled, Sampled(step=step, slots=slots, tokens=tokens))

    def close(self) -> None:
        self._masks.close()
        self._sampled.close()


@dataclass(frozen=True, slots=True)
class Allowed:
    """Ids that samples may be given. rows: [samples], which of the masks is a sample's, -1 where it may be any id;
    bits: [masks, bytes], as in the message Masks."""

    rows: Ints
    bits: Bytes

    @property
    def constrained(self) -> NDArray[np.bool_]:
        """[samples]"""
        return self.rows >= 0

    def of(self, samples: Ints) -> Allowed:
        return Allowed(self.rows[samples], self.bits)

    def banned(self, ids: range) -> NDArray[np.bool_]:
        """[constrained samples, ids]: which of the model's `ids` they may not be given."""
        bits = self.bits[self.rows[self.constrained]]
        # Whole bytes, which a rank's share of the ids may begin and end within.
        first, end = ids.start // 8, -(-ids.stop // 8)
        found = np.unpackbits(bits[:, first:end], axis=1, bitorder="little")
        banned: NDArray[np.bool_] = found[:, ids.start - 8 * first :][:, : len(ids)] == 0
        return banned


def allowed(matcher: Matcher | None, step: int, constrained: NDArray[np.bool_]) -> Allowed | None:
    """What the matcher says of a step, some of whose samples are constrained; None where none is."""
    if not constrained.any():
        return None
    assert matcher is not None, "there is no matcher in a warm-up"
    rows = np.where(constrained, np.cumsum(constrained) - 1, -1)
    return Allowed(rows, matcher.masks(step).reshape(int(constrained.sum()), -1))
