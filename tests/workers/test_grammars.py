"""The whole replica in one process: outputs follow their grammars however they are scheduled, and nobody else's do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.matching import lark, regex, schema
from tests.support.tiny import tiny_model
from tests.workers.test_engine import expect_no_output, prompts
from toka.messages import Finish
from toka.model import open_model

PATTERN = r"[ab]{3,9}-[0-9]{1,5}x"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
}
SIZES = {"max_seqs": 16, "kv_cache_tokens": 8192}


def is_person(value: dict[str, Any]) -> bool:
    """Whether PERSON takes it."""
    name, age, tags, at = (value.pop(key) for key in ("name", "age", "tags", "at"))
    zip_code = at.pop("zip")
    return (
        not value
        and not at
        and len(name) <= 8
        and type(age) is int
        and 0 <= age <= 150
        and len(tags) <= 3
        and set(tags) <= {"x", "y"}
        and re.fullmatch("[0-9]{5}", zip_code) is not None
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Text:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._tokenizer = engine, open_model(str(folder)).tokenizer()

    def of(self, request: bytes, sample: int = 0) -> str:
        """Of an output that has ended by itself."""
        answer = self._engine.answers[request, sample]
        assert answer.finish == Finish.STOP and answer.tokens[-1] == 2
        return str(self._tokenizer.decode(answer.tokens))

    def matches(self, request: bytes, pattern: str, n: int = 1) -> bool:
        return all(re.fullmatch(pattern, self.of(request, sample)) for sample in range(n))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.5},
        {"temperature": 0.0},
        {"temperature": 1.2, "top_p": 0.7, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logit_bias": {7: 100.0, 2: 50.0}, "min_tokens": 40, "presence_penalty": 0.5},
    ],
    ids=["hot", "greedy", "filtered", "edited"],
)
def test_every_sample_of_a_prompt_matches(folder, params):
    engine = Engine(folder, **SIZES)
    text = Text(engine, folder)
    request = engine.submit([5, 6, 7], 60, n=8, grammar=regex(PATTERN), **params)
    engine.finish()
    assert text.matches(request, PATTERN, 8)
    assert len({text.of(request, sample) for sample in range(8)}) == (1 if params["temperature"] == 0 else 8)


def test_a_schema(folder):
    engine = Engine(folder, **SIZES)
    text = Text(engine, folder)
    requests = [
        engine.submit(prompt, 300, temperature=1.5, logprobs=3, grammar=schema(PERSON)) for prompt in prompts(12)
    ]
    engine.finish()
    for request in requests:
        if engine.answers[request, 0].finish == Finish.STOP:
            assert is_person(json.loads(text.of(request)))
    finished = [engine.answers[request, 0].finish for request in requests]
    assert finished.count(Finish.STOP) >= 8


def test_across_preemptions(folder):
    engine = Engine(folder, max_seqs=8, kv_cache_tokens=320, max_tokens_per_step=64)
    text = Text(engine, folder)
    expect_no_output(engine)
    pattern = r"([ab]{9}-){3}x"
    requests = [engine.submit(prompt, 60, temperature=1.0, grammar=regex(pattern)) for prompt in prompts(16)]
    engine.finish()
    assert engine.scheduler.state.preemptions > 0
    assert all(text.matches(request, pattern) for request in requests)


def test_the_others_get_what_they_would_get_alone(folder):
    options = [{}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8, "logprobs": 2}, {"presence_penalty": 1.0}]
    alone = Engine(folder, **SIZES)
    free = [alone.submit(prompt, 24, **{"seed": i} | options[i % 4]) for i, prompt in enumerate(prompts(8))]
    alone.finish()
    engine = Engine(folder, **SIZES)
    mixed, bound = [], []
    for i, prompt in enumerate(prompts(8)):
        mixed.append(engine.submit(prompt, 24, **{"seed": i} | options[i % 4]))
        bound.append(engine.submit(prompt, 60, temperature=1.0, grammar=regex(PATTERN)))
    engine.finish()
    text = Text(engine, folder)
    assert all(text.matches(request, PATTERN) for request in bound)
    for before, after in zip(free, mixed):
        assert engine.answers[after, 0].tokens == alone.answers[before, 0].tokens


def test_log_probabilities_are_those_of_the_model(folder):
    """Of ids that the grammar left no choice about, too."""
    engine = Engine(folder, **SIZES)
    request = engine.submit([5, 6, 7], 20, grammar=regex("abcab"), logprobs=0)
    engine.finish()
    assert all(value < -0.01 for value in engine.answers[request, 0].chosen)


def test_it_begins_after_an_id(folder):
    engine = Engine(folder, **SIZES)
    begin = 77
    request = engine.submit(
        [5, 6, 7], 200, n=4, temperature=1.5, ignore_eos=False, grammar=regex(PATTERN), grammar_after=begin,
        logit_bias={begin: 4.0, 2: -100.0},
    )  # fmt: skip
    engine.finish()
    tokenizer = open_model(str(folder)).tokenizer()
    begun = 0
    for sample in range(4):
        tokens = engine.answers[request, sample].tokens
        if begin in tokens:
            begun += 1
            after = tokens[tokens.index(begin) + 1 :]
            # Without its end the bias keeps it going; what is there is the grammar's alone.
            assert re.fullmatch(PATTERN, tokenizer.decode(after))
            assert engine.answers[request, sample].finish == Finish.STOP
    assert begun >= 2


def test_a_slot_that_had_a_grammar_is_free_of_it(folder):
    engine = Engine(folder, max_seqs=1, kv_cache_tokens=1024)
    alone = engine.generate([[5, 6, 7]], 12)
    engine.generate([[5, 6, 7]], 30, grammar=regex(PATTERN))
    assert engine.generate([[5, 6, 7]], 12) == alone


def test_a_request_with_a_bad_grammar_is_refused_and_the_rest_goes_on(folder):
    engine = Engine(folder, **SIZES)
    text = Text(engine, folder)
    bad = engine.submit([5, 6], 9, n=3, grammar=regex("(a"))
    good = engine.submit([5, 6], 60, grammar=regex(PATTERN))
    engine.finish()
    assert "the grammar cannot be used" in engine.refused[bad]
    assert text.matches(good, PATTERN)
    assert not engine.scheduler.state.shards[bad]


def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(folder):
    engine = Engine(folder, **SIZES)
    text = Text(engine, folder)
    ambiguous = lark('start: e\ne: e e | e e e | "a" | e "b"')
    bad = engine.submit([5, 6], 400, n=2, temperature=1.0, min_tokens=399, grammar=ambiguous)
    good = engine.submit([5, 6], 60, grammar=regex(PATTERN))
    engine.finish()
    assert "the grammar cannot be followed" in engine.refused[bad]
    assert 20 < len(engine.answers[bad, 0].tokens) < 399
    assert text.matches(good, PATTERN)
