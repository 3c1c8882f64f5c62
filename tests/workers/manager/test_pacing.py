"""What goes first changes when tokens are computed, and no byte of a response.

Beside them stands how much of a prompt was found in the cache: that says what the cache held when the sequence was
admitted, depends on arrivals to the millisecond, and is not compared.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.null_stage import draw
from tests.support.replica import VOCAB, Replica, welcome
from toka.messages import Finish, Outputs, Tokens, decode
from workers.manager.pacing import ADMISSION_DEADLINE, RESULTS_DEADLINE, Pacing

EOS = 0
PREFIX = list(range(10, 58))
ALWAYS = "lambda self, queued: self.results_waited < pacing.RESULTS_DEADLINE"
NEVER = "lambda self, queued: False"
FORCED = """
from workers.manager import __main__, pacing
pacing.Pacing.hurry = {}
__main__.main()
"""


class Response(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    finish: int


def at_once(step: int) -> None: ...


def irregular(step: int) -> None:
    """Mostly fast, so that the stage runs dry; now and then so slow that everything is caught up with."""
    time.sleep((0, 0, 0.001, 0, 0.004, 0, 0, 0.02)[step % 8])


def slow(step: int) -> None:
    time.sleep(0.004)


def respond(folder: Path, hurry: str, pace: Callable[[int], None]) -> tuple[dict[tuple[bytes, int], Response], Pacing]:
    """All responses to the same requests, and what the pacing's counters were at last."""
    replica = Replica(folder, *(("-c", FORCED.format(hurry)) if hurry else ()), pace=pace, trace="on")
    try:
        welcome(replica)
        replica.hold.clear()
        # 4 slots, 40 pages: they wait for each other's slots, pages and prefixes.
        for number in range(1, 13):
            prompt = [*PREFIX[: 12 * (number % 5)], 60 + number]
            n = 1 + 2 * (number % 3 == 0)
            replica.submit(number, prompt, 40 + 9 * number, n, ignore_eos=number % 2 == 0, logprobs=number % 4 - 1)
        replica.hold.set()
        responses = receive(replica, 12 + 4 * 2)
        replica.process.send_signal(signal.SIGTERM)
        assert replica.process.wait(20) == 0
    finally:
        replica.close()
    return responses, counters(folder)


def receive(replica: Replica, sequences: int) -> dict[tuple[bytes, int], Response]:
    got: dict[tuple[bytes, int], Response] = {}
    while sequences:
        message = replica.receive(Outputs)
        sequences -= sum(message.finished_sequences)
        tokens = decode(message.payload)
        assert isinstance(tokens, Tokens)
        at = scored = 0
        for row, (sample, count) in enumerate(zip(tokens.samples.tolist(), tokens.counts.tolist())):
            name = tokens.requests[16 * row : 16 * row + 16], sample
            had = got.get(name, Response([], [], 0))
            assert tokens.first[row] == len(had.tokens)
            scores = count if tokens.logprobs[row] >= 0 else 0
            got[name] = Response(
                had.tokens + tokens.tokens[at : at + count].tolist(),
                had.logprobs + tokens.chosen[scored : scored + scores].tolist(),
                int(tokens.finish[row]),
            )
            at, scored = at + count, scored + scores
    return got


def counters(folder: Path) -> Pacing:
    """As the manager's trace has them at its end."""
    (path,) = folder.glob("*.trace")
    events = json.loads(path.read_text())["traceEvents"]
    sends = [e["args"]["hurried"] for e in events if e["name"] == "send"]
    last = [e["args"] for e in events if e["name"] == "postponed"][-1]
    return Pacing(
        depth=2,
        plans=len(sends),
        hurried=sum(sends),
        admissions_postponed=last["admissions"],
        results_postponed=last["results"],
    )


def wanted() -> dict[tuple[bytes, int], tuple[list[int], int]]:
    """Tokens and finish of each sample: a function of (seed, sample, position) alone."""
    made: dict[tuple[bytes, int], tuple[list[int], int]] = {}
    for number in range(1, 13):
        for sample in range(1 + 2 * (number % 3 == 0)):
            tokens = [draw(number, sample, position, VOCAB) for position in range(40 + 9 * number)]
            finish = Finish.LENGTH
            if number % 2 and EOS in tokens:
                tokens, finish = tokens[: tokens.index(EOS) + 1], Finish.STOP
            made[number.to_bytes(16, "big"), sample] = tokens, finish
    return made


@pytest.fixture(scope="module")
def never(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[bytes, int], Response], Pacing]:
    return respond(tmp_path_factory.mktemp("never"), NEVER, at_once)


def test_nothing_is_postponed_where_nothing_hurries(never: tuple[dict[tuple[bytes, int], Response], Pacing]):
    responses, pacing = never
    assert {name: (each.tokens, each.finish) for name, each in responses.items()} == wanted()
    assert pacing.plans > 100
    assert (pacing.hurried, pacing.admissions_postponed, pacing.results_postponed) == (0, 0, 0)


@pytest.mark.parametrize("pace", [at_once, irregular, slow])
@pytest.mark.parametrize("hurry", [ALWAYS, ""], ids=["always", "own"])
def test_postponing_changes_no_byte(
    tmp_path: Path,
    never: tuple[dict[tuple[bytes, int], Response], Pacing],
    hurry: str,
    pace: Callable[[int], None],
):
    responses, pacing = respond(tmp_path, hurry, pace)
    assert responses == never[0]
    if hurry == ALWAYS:
        assert pacing.hurried > pacing.plans / 4
        assert pacing.admissions_postponed > 0 and pacing.results_postponed >= pacing.hurried


def test_deadlines_and_counters():
    pacing = Pacing(depth=2)
    admitted, hurried = [], []
    for _ in range(12):
        hurry = pacing.hurry(queued=0)
        admit = pacing.admit(hurry)
        hurried.append(hurry)
        admitted.append(admit)
        pacing.planned(waiting_results=3 if hurry else 0, admitted=admit)
    assert hurried == ([True] * RESULTS_DEADLINE + [False]) * 2 + [True] * 2
    gaps = "".join("a" if admit else "." for admit in admitted).split("a")
    assert max(map(len, gaps)) == ADMISSION_DEADLINE
    assert not pacing.hurry(queued=1), "the stage has something to do"
    assert (pacing.plans, pacing.hurried, pacing.results_postponed) == (12, 10, 30)
    assert pacing.admissions_postponed == admitted.count(False)
