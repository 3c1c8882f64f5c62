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
from workers.manager.pacing import ADMISSION_DEADLINE, Pacing

EOS = 0
PREFIX = list(range(10, 58))
ALWAYS = "lambda self, queued: self.wants_plan(queued)"
NEVER = "lambda self, queued: False"
FORCED = """
from workers.manager import __main__, pacing
pacing.Pacing.hurry = {}
__main__.main()
"""


class Counts(NamedTuple):
    """Plans sent, those that went before results or admission, and the results that they went before."""

    plans: int
    hurried: int
    admissions_postponed: int
    results_postponed: int


class Response(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    finish: int


Responses = dict[tuple[bytes, int], Response]


def at_once(step: int) -> None: ...


def irregular(step: int) -> None:
    """Mostly fast, so that the stage runs dry; now and then so slow that everything is caught up with."""
    time.sleep((0, 0, 0.001, 0, 0.004, 0, 0, 0.02)[step % 8])


def slow(step: int) -> None:
    time.sleep(0.004)


def respond(folder: Path, hurry: str, pace: Callable[[int], None], depth: int = 2) -> tuple[Responses, Counts]:
    """All responses to the same requests, and what was postponed."""
    program = ("-c", FORCED.format(hurry)) if hurry else ()
    replica = Replica(folder, *program, pace=pace, trace="on", run_ahead=depth)
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


def receive(replica: Replica, sequences: int) -> Responses:
    got: Responses = {}
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


def counters(folder: Path) -> Counts:
    """As the manager's trace has them at its end."""
    (path,) = folder.glob("*.trace")
    events = json.loads(path.read_text())["traceEvents"]
    sends = [e["args"]["hurried"] for e in events if e["name"] == "send"]
    last = [e["args"] for e in events if e["name"] == "postponed"][-1]
    return Counts(len(sends), sum(sends), last["admissions"], last["results"])


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
def never(tmp_path_factory: pytest.TempPathFactory) -> tuple[Responses, Counts]:
    return respond(tmp_path_factory.mktemp("never"), NEVER, at_once)


def test_nothing_is_postponed_where_nothing_hurries(never: tuple[Responses, Counts]):
    responses, counts = never
    assert {name: (each.tokens, each.finish) for name, each in responses.items()} == wanted()
    assert counts.plans > 100
    assert counts[1:] == (0, 0, 0)


@pytest.mark.parametrize("pace", [at_once, irregular, slow])
@pytest.mark.parametrize("hurry", [ALWAYS, ""], ids=["always", "own"])
def test_postponing_changes_no_byte(
    tmp_path: Path, never: tuple[Responses, Counts], hurry: str, pace: Callable[[int], None]
):
    responses, counts = respond(tmp_path, hurry, pace)
    assert responses == never[0]
    if hurry == ALWAYS:
        assert counts.hurried > counts.plans / 4
        assert counts.admissions_postponed > 0 and counts.results_postponed >= counts.hurried
    elif pace == irregular:
        assert counts.hurried > 0, "the stage runs dry after each of its long steps"


def test_without_running_ahead_every_result_hurries_the_next_plan(tmp_path: Path, never: tuple[Responses, Counts]):
    responses, counts = respond(tmp_path, "", at_once, depth=1)
    assert responses == never[0]
    assert counts.results_postponed == counts.hurried > 0.8 * counts.plans
    assert counts.admissions_postponed > counts.plans / 2


def test_admission_waits_for_so_many_hurried_plans_and_no_more():
    pacing = Pacing(depth=1)
    admitted = []
    for _ in range(12):
        assert pacing.wants_plan(queued=0) and pacing.hurry(queued=0)
        admitted.append(pacing.admit(hurrying=True))
        pacing.planned(waiting_results=1, admitted=admitted[-1])
    assert admitted == ([False] * ADMISSION_DEADLINE + [True]) * 4
    assert (pacing.admissions_postponed, pacing.results_postponed) == (8, 12)


def test_after_a_hurried_plan_the_books_are_kept():
    pacing = Pacing(depth=2)
    assert not pacing.admit(pacing.hurry(queued=0))
    pacing.planned(waiting_results=2, admitted=False)
    assert pacing.wants_plan(queued=1) and not pacing.hurry(queued=1) and pacing.admit(hurrying=False)
    pacing.planned(waiting_results=0, admitted=True)
    assert not pacing.wants_plan(queued=2)
    assert (pacing.admissions_postponed, pacing.results_postponed) == (1, 2)
