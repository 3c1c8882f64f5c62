"""Masks by hand: what is allowed when, in whatever order the manager and the stage are heard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from tests.support.matching import lark, regex
from tests.support.tiny import VOCAB_SIZE, tiny_config
from toka.messages import Constrain, GrammarFailed, GrammarSetup, Masks, Sampled
from toka.model import open_model
from workers.matcher import grammars as module
from workers.matcher.grammars import Grammars
from workers.matcher.matching import Matching

EOS, OTHER_EOS, MODEL_IDS = 2, 0, 600
"""The model has more ids than its tokenizer has tokens."""
AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | e "b"'
"""What is kept of it grows with the output, beyond all limits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_config(tmp_path_factory.mktemp("model") / "tiny", eos_token_id=[EOS, OTHER_EOS])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": MODEL_IDS}))
    generation = path / "generation_config.json"
    generation.unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(str(folder))


class Hands:
    def __init__(self, folder: Path, grammars: Grammars) -> None:
        self.matching = Matching(grammars)
        self._ids = dict(open_model(str(folder)).tokenizer().get_vocab())
        self._step = 0

    def id(self, text: str) -> int:
        return self._ids[text]

    def constrain(
        self, samples: Sequence[tuple[int, int]], setups: Sequence[tuple[int, str]] = (), **options: object
    ) -> int:
        """samples: (slot, position); setups: (slot, grammar), all with the same options. The step's number."""
        self._step += 1
        given = {"grammar_after": -1, "banned_ids": [], "min_tokens": 0, "outputs": []} | options
        given["outputs"] = np.array(given["outputs"], np.int32).tobytes()
        slots, positions = np.array(samples, np.int32).reshape(-1, 2).T
        self.matching.constrain(
            Constrain(
                step=self._step,
                grammars=[text for _, text in setups],
                setups=[GrammarSetup(slot=slot, grammar=i, **given) for i, (slot, _) in enumerate(setups)],  # type: ignore[arg-type]
                slots=slots,
                positions=positions,
            )
        )
        return self._step

    def sampled(self, step: int, *tokens: int) -> None:
        none = np.empty(0, np.int32)
        self.matching.sampled(Sampled(step=step, slots=none, tokens=np.array(tokens, np.int32)))

    def told(self) -> dict[int, list[list[int]]]:
        """The ids allowed in each row, by step."""
        found = {}
        for message in self.matching.advance():
            assert isinstance(message, Masks)
            bits = message.bits.reshape(-1, 4 * -(-MODEL_IDS // 32))
            found[message.step] = [np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist() for row in bits]
        return found

    def first(self, setups: Sequence[tuple[int, str]], position: int = 0, **options: object) -> list[list[int]]:
        """What a step's first samples may be."""
        step = self.constrain([(slot, position) for slot, _ in setups], setups, **options)
        return self.told()[step]


@pytest.fixture
def hands(folder: Path, grammars: Grammars) -> Hands:
    return Hands(folder, grammars)


def test_the_next_step_waits_for_what_this_one_samples(hands: Hands):
    a, b = hands.id("a"), hands.id("b")
    one = hands.constrain([(3, 0), (5, 0)], [(3, regex("ab")), (5, regex("ba"))])
    two = hands.constrain([(3, 1), (5, 1)])
    assert hands.told() == {one: [[a], [b]]}
    assert hands.told() == {} and hands.matching.pending
    hands.sampled(one, a, b)
    assert hands.told() == {two: [[b], [a]]}
    assert not hands.matching.pending


def test_steps_of_others_overtake(hands: Hands):
    """Microbatches: each waits for its own."""
    a, b = hands.id("a"), hands.id("b")
    one, two = hands.constrain([(0, 0)], [(0, regex("ab"))]), hands.constrain([(1, 0)], [(1, regex("ba"))])
    three, four = hands.constrain([(0, 1)]), hands.constrain([(1, 1)])
    assert hands.told() == {one: [[a]], two: [[b]]}
    hands.sampled(two, b)
    assert hands.told() == {four: [[a]]}
    hands.sampled(one, a)
    assert hands.told() == {three: [[b]]}


def test_what_comes_late_is_for_who_had_the_slot(hands: Hands):
    """The manager has the ids, and gives the slot away, before the matcher has them."""
    a, b = hands.id("a"), hands.id("b")
    one = hands.constrain([(0, 0)], [(0, regex("ab"))])
    assert hands.told() == {one: [[a]]}
    two = hands.constrain([(0, 0)], [(0, regex("ba"))])
    hands.sampled(one, a)
    assert hands.told() == {two: [[b]]}


def test_an_end_is_every_end_id_and_whatever_comes_then(hands: Hands):
    a = hands.id("a")
    step = hands.constrain([(0, 0)], [(0, regex("a"))])
    steps = [hands.constrain([(0, position)]) for position in (1, 2, 3)]
    ends = [[OTHER_EOS, EOS]]
    for number, token in zip([step, *steps], [a, EOS, EOS, 7]):
        assert hands.told() == {number: [[a]] if number == step else ends}
        hands.sampled(number, token)


def test_where_it_may_go_on_or_end(hands: Hands):
    a = hands.id("a")
    assert set(hands.first([(0, regex("a*"))])[0]) >= {a, EOS, OTHER_EOS}


def test_rebuilt_from_ids(hands: Hands):
    a, b, x = hands.id("a"), hands.id("b"), hands.id("x")
    assert hands.first([(0, regex("abx"))], position=2, outputs=[a, b]) == [[x]]


def test_anything_until_the_id_that_it_begins_after(hands: Hands):
    a, b = hands.id("a"), hands.id("b")
    one = hands.constrain([(0, 0)], [(0, regex("ab"))], grammar_after=7)
    two, three, four = (hands.constrain([(0, position)]) for position in (1, 2, 3))
    everything = hands.told()[one][0]
    assert set(everything) >= set(range(VOCAB_SIZE))
    hands.sampled(one, b)
    assert hands.told() == {two: [everything]}
    hands.sampled(two, 7)
    assert hands.told() == {three: [[a]]}
    hands.sampled(three, a)
    assert hands.told() == {four: [[b]]}
    assert hands.first([(1, regex("ab"))], position=3, grammar_after=7, outputs=[b, 7, a]) == [[b]]
    assert hands.first([(2, regex("ab"))], position=2, grammar_after=7, outputs=[b, a]) == [everything]


def test_ids_without_a_token_are_never_allowed(hands: Hands):
    (found,) = hands.first([(0, regex("(?s:.*)"))])
    assert max(found) < VOCAB_SIZE and 1 not in found


def test_bans_hold_until_min_tokens_unless_nothing_else_is_left(hands: Hands):
    a, banned = hands.id("a"), {"banned_ids": [OTHER_EOS, EOS], "min_tokens": 2}
    assert set(hands.first([(0, regex("a{0,5}"))], **banned)[0]) & {a, EOS, OTHER_EOS} == {a}
    assert set(hands.first([(0, regex("a{0,5}"))], position=2, outputs=[a, a], **banned)[0]) > {EOS, OTHER_EOS}
    assert hands.first([(0, regex("a"))], position=1, outputs=[a], **banned) == [[OTHER_EOS, EOS]]
    (before,) = hands.first([(0, regex("a"))], grammar_after=7, **banned)
    assert EOS not in before and a in before


def test_masks_wait_until_the_manager_has_ended_what_failed(hands: Hands):
    a = hands.id("a")
    step, position = hands.constrain([(0, 0), (1, 0)], [(0, lark(AMBIGUOUS)), (1, regex("a*"))]), 0
    while True:
        told = hands.matching.advance()
        if isinstance(told[0], GrammarFailed):
            break
        later, position = hands.constrain([(0, position + 1), (1, position + 1)]), position + 1
        hands.sampled(step, a, a)
        step = later
    (failed,) = told
    assert failed.slot == 0 and failed.reason.startswith("the grammar cannot be followed: ")
    assert "\n" not in failed.reason
    following = hands.constrain([(0, position + 1), (1, position + 1)])
    assert hands.told() == {} and hands.matching.pending
    hands.matching.answered(failed)
    assert hands.told()[step][0] == [OTHER_EOS, EOS]
    hands.sampled(step, EOS, a)
    # Told once, and in nobody's way from then on.
    assert a in hands.told()[following][1]


def test_ids_that_do_not_fit_are_a_failure(hands: Hands):
    hands.constrain([(0, 1)], [(0, regex("ab"))], outputs=[hands.id("b")])
    (failed,) = hands.matching.advance()
    assert isinstance(failed, GrammarFailed)


def test_samples_share_a_grammar_and_not_their_places(hands: Hands):
    a, b = hands.id("a"), hands.id("b")
    text = regex("a+b")
    one = hands.constrain([(0, 0), (1, 0)], [(0, text), (1, text)])
    hands.told()
    two = hands.constrain([(0, 1), (1, 1)])
    hands.sampled(one, a, a)
    hands.told()
    three = hands.constrain([(0, 2), (1, 2)])
    hands.sampled(two, b, a)
    first, second = hands.told()[three]
    assert first == [OTHER_EOS, EOS] and {a, b} <= set(second)


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", '{"grammars": []}', json.dumps({"grammars": [{"json_schema": {"type": "none"}}]}), regex("(a")],
)
def test_what_is_no_grammar_says_so(grammars: Grammars, text: str):
    error = grammars.of(text).exception()
    assert isinstance(error, ValueError) and str(error).startswith("the grammar cannot be used: ")
    assert "\n" not in str(error)


def test_rules_that_nest_deep_do_not_end_the_process(grammars: Grammars):
    rules = "\n".join(f'r{i}: r{i + 1} "a"' for i in range(5000))
    assert isinstance(grammars.of(lark(f'start: r0\n{rules}\nr5000: "e"')).result(), LLMatcher)


def test_compiled_grammars_are_kept_and_the_oldest_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST_COMPILED", 3)
    grammars = Grammars(str(folder))
    first = grammars.of(regex("a"))
    assert grammars.of(regex("a")) is first
    for letter in "bcd":
        grammars.of(regex(letter))
    assert grammars.of(regex("a")) is not first


def test_a_model_without_an_end_takes_no_grammars(tmp_path: Path):
    folder = tiny_config(tmp_path / "m", eos_token_id=None)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    error = Grammars(str(folder)).of(regex("a")).exception()
    assert "no end-of-sequence id" in str(error)
