"""What `toka-batch` knows of its files, without a server: what is left of them, and what it refuses to touch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.batches import COMPLETIONS, jsonl, line
from toka.batch_journal import BYTES_AT_ONCE, LINES_AT_ONCE, Journal, Line
from toka.batch_lines import Item, LineError, refusal, result

LONGEST = 1000


def answer(each: Line) -> tuple[bytes, bool]:
    """As the command answers a line."""
    if isinstance(each.item, LineError):
        return refusal("offline", each.number, each.item), False
    good = each.number % 5 != 0
    return result("offline", each.number, each.item.custom_id, 200 if good else 400, b'{"a":1}'), good


def left(journal: Journal) -> list[Line]:
    return [each for lines in journal.left() for each in lines]


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "errors apart"])
def test_each_line_is_left_until_it_is_answered_and_never_again(tmp_path: Path, apart: bool):
    """Whatever is wrong with it, and wherever the one before stopped in the middle of an answer."""
    rng = random.Random(5)
    kinds = [
        lambda n: line(f"r{n}", prompt=f"tale {n}"),
        lambda n: line("again"),
        lambda n: line(f"r{n - 1}", method="GET"),
        lambda n: line(f"g{n}") | {"method": "GET"},
        lambda n: line(f"s{n}", stream=True),
        lambda n: line(f"l{n}", prompt="x" * LONGEST),
        lambda n: "{",
        lambda n: "  ",
    ]
    lines = [rng.choice(kinds)(number) for number in range(700)]
    source, output, errors = tmp_path / "in", tmp_path / "out", tmp_path / "err" if apart else None
    source.write_bytes(jsonl(lines).rstrip(b"\n"))
    total = sum(each != "  " for each in lines)
    while True:
        with Journal(source, output, errors, LONGEST) as journal:
            assert journal.total == total and journal.done == total - len(left(journal))
            open_lines = left(journal)
            for each in rng.sample(open_lines, min(97, len(open_lines))):
                journal.write(*answer(each))
            failed = journal.failed
        if not open_lines:
            break
        with rng.choice([output, errors or output]).open("ab") as file:
            file.write(answer(open_lines[0])[0][: rng.randrange(1, 60)])
    written = [json.loads(each) for path in filter(None, [output, errors]) for each in path.read_text().splitlines()]
    numbers = sorted(int(each["id"].rpartition("_")[2]) for each in written)
    assert numbers == [number for number, each in enumerate(lines, 1) if each != "  "]
    bad = [each for each in written if each["error"] or each["response"]["status_code"] != 200]
    assert len(bad) == failed and {each["error"]["code"] for each in bad if each["error"]} == {
        "duplicate_custom_id", "invalid_json_line", "invalid_method", "unsupported_parameter", "request_too_large"
    }  # fmt: skip
    if errors:
        assert len(errors.read_text().splitlines()) == failed


def test_lines_come_in_portions_sorted_by_their_prompts(tmp_path: Path):
    source = tmp_path / "in"
    prompts = [f"{random.Random(number).randrange(9)} {number}" for number in range(LINES_AT_ONCE + 10)]
    source.write_bytes(jsonl(line(f"{number}", prompt=prompt) for number, prompt in enumerate(prompts)))
    with Journal(source, tmp_path / "out", None, BYTES_AT_ONCE) as journal:
        portions = list(journal.left())
    assert [len(each) for each in portions] == [LINES_AT_ONCE, 10]
    assert [each.number - 1 for each in portions[0]] == sorted(range(LINES_AT_ONCE), key=lambda n: prompts[n])
    assert all(isinstance(each.item, Item) and each.item.url == COMPLETIONS for each in portions[1])


def test_an_answered_line_may_have_moved(tmp_path: Path):
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(jsonl([line("a"), line("b")]))
    with Journal(source, output, None, LONGEST) as journal:
        journal.write(*answer(left(journal)[1]))
    source.write_bytes(jsonl([line("new"), line("b"), line("a")]))
    with Journal(source, output, None, LONGEST) as journal:
        assert {each.item.custom_id for each in left(journal)} == {"new", "a"}


@pytest.mark.parametrize("content", [b"notes without a line break", b'{"id": 3}\n', b"[]\n", b"\xff\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: bytes):
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(jsonl([line("a")]))
    output.write_bytes(content)
    with pytest.raises(ValueError, match="out: line 1 is no answer of toka-batch"):
        Journal(source, output, None, LONGEST)
    assert output.read_bytes() == content


def test_files_that_cannot_be_had(tmp_path: Path):
    source, output = tmp_path / "in", tmp_path / "out"
    with pytest.raises(ValueError, match="in: No such file"):
        Journal(source, output, None, LONGEST)
    assert not output.exists()
    source.touch()
    with pytest.raises(ValueError, match="different files"):
        Journal(source, source, None, LONGEST)
    with pytest.raises(ValueError, match="different files"):
        Journal(source, output, tmp_path / "x" / ".." / "out", LONGEST)
    with pytest.raises(ValueError, match="Is a directory"):
        Journal(source, tmp_path, None, LONGEST)
    with Journal(source, output, None, LONGEST) as journal:
        assert (journal.total, journal.done, left(journal)) == (0, 0, [])
        with pytest.raises(ValueError, match="another process writes to it"):
            Journal(source, output, None, LONGEST)
