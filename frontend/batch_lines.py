"""What a line of a batch becomes: a request that stands behind all interactive ones."""

from __future__ import annotations

import msgspec

from frontend.schema import INT32
from toka.batch_lines import UNREADABLE, Item, order

PRIORITY = 1 << 20
"""Of a batch's requests: later than any interactive one that does not ask for worse ..."""
PRIORITY_RANGE = PRIORITY - 1
"""... and so far from it is what a line asks for counted."""


def request(item: Item) -> tuple[bytes, bytes]:
    """The body to post, at a batch's priority, and by what it is sorted. LineError where it cannot be posted."""
    fields = item.fields()
    try:
        own = msgspec.json.decode(fields.get("priority", b"null"), type=int | None) or 0
    except UNREADABLE:
        own = INT32 + 1
    if not fields or abs(own) > INT32:
        return bytes(item.body), order(fields)  # The server says what is wrong with it.
    priority = PRIORITY + max(-PRIORITY_RANGE, min(PRIORITY_RANGE, own))
    return msgspec.json.encode(fields | {"priority": priority}), order(fields)
