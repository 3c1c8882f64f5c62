"""Structured logs: one line for each event on stderr, `time level part event key=value ...`.

log = logging.getLogger(__name__)
log.info("replica joined", extra={"replica": "r0", "credits": 64})
"""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_QUIET = ("asyncio", "aiohttp.access", "filelock", "httpcore", "httpx", "huggingface_hub", "urllib3")
"""Libraries that log what is no event of ours below this level: warning."""


class LineFormatter(logging.Formatter):
    """Formats a record as one line; what the call gave as `extra` follows as key=value."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        event = record.getMessage().replace("\n", "\\n")
        words = [f"{stamp}.{int(record.msecs):03d}", record.levelname.lower(), self.part, event]
        words += [f"{key}={_text(value)}" for key, value in record.__dict__.items() if key not in _STANDARD]
        if record.exc_info:
            words.append(f"traceback={_text(self.formatException(record.exc_info))}")
        return " ".join(words)


def _text(value: object) -> str:
    """`value` as one word: quoted where it has spaces, quotes or line breaks."""
    text = value.hex() if isinstance(value, bytes) else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(" \"'=") else json.dumps(text)


def configure(part: str, level: str) -> None:
    """Send this process's logs to stderr, from `level` (debug, info, warning, error) on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(part))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.WARNING))
