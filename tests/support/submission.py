"""The header of a Submit, as its Work has it."""

from __future__ import annotations

from collections.abc import Sequence

from toka.messages import Frame, Submit, Work


def header(frontend: bytes, request: bytes, work: Work, *, priority: int = 0, payload: Sequence[Frame] = ()) -> Submit:
    return Submit(
        frontend=frontend,
        request=request,
        first_sample=0,
        sequences=len(work.samples),
        prompt_tokens=len(work.prompt),
        priority=priority,
        page_hashes=b"",
        payload=list(payload),
    )
