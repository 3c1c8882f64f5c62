"""Batches through the `openai` client: what is answered, refused, cancelled, expired; and a frontend that is killed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from frontend.batch_lines import PRIORITY
from tests.support.batches import COMPLETIONS, jsonl, line, over, results, start, wait
from tests.support.demo import ids_of, peer_text
from tests.support.engine_peer import EnginePeer, script
from tests.support.frontend_process import FrontendProcess
from toka.messages import Cancel, Submit, Work, decode

MAX_BODY = 65_536
BAD_LINES: list[tuple[str, str | None, str]] = [
    ("{", None, "invalid_json_line"),
    ("[1]", None, "invalid_json_line"),
    (json.dumps(line(None)), None, "missing_required_parameter"),
    (json.dumps(line("")), None, "missing_required_parameter"),
    (json.dumps(line("same")), "same", "duplicate_custom_id"),
    (json.dumps(line("get") | {"method": "GET"}), "get", "invalid_method"),
    (json.dumps(line("chat", "/v1/chat/completions")), "chat", "mismatched_url"),
    (json.dumps(line("more") | {"more": 1}), "more", "unknown_parameter"),
    (json.dumps({"custom_id": "none", "method": "POST", "url": COMPLETIONS}), "none", "missing_required_parameter"),
    (json.dumps(line("stream", stream=True)), "stream", "unsupported_parameter"),
    (json.dumps(line("long", prompt="x" * MAX_BODY)), None, "request_too_large"),
]


def client(frontend: FrontendProcess) -> openai.OpenAI:
    url = f"{frontend.url}/v1"
    return openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=30, _strict_response_validation=True)


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnginePeer, FrontendProcess]]:
    folder = tmp_path_factory.mktemp("data")
    settings = [f"data_dir={folder}", "batch_items=16", f"max_body_bytes={MAX_BODY}"]
    with EnginePeer() as peer, FrontendProcess(peer.endpoint, *settings) as frontend:
        frontend.wait_until_serving()
        yield peer, frontend


@pytest.fixture
def peer(batching: tuple[EnginePeer, FrontendProcess]) -> Iterator[EnginePeer]:
    peer, _ = batching
    peer.seen.clear()
    yield peer
    peer.reset()


@pytest.fixture
def sdk(batching: tuple[EnginePeer, FrontendProcess]) -> Iterator[openai.OpenAI]:
    with client(batching[1]) as sdk:
        yield sdk


def test_every_line_is_answered_once(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    batch = start(sdk, jsonl(line(f"r{number}", seed=number) for number in range(100)))
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"run": "1"}, COMPLETIONS)
    batch = wait(sdk, batch, over)
    assert batch.status == "completed" and batch.error_file_id is None
    assert batch.request_counts is not None and batch.usage is not None
    assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
    assert batch.usage.output_tokens == 800 and batch.usage.total_tokens == 800 + batch.usage.input_tokens
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    found = results(sdk, batch.output_file_id)
    assert sorted(each["custom_id"] for each in found) == sorted(f"r{number}" for number in range(100))
    assert len({each["id"] for each in found}) == 100
    for each in found:
        assert each["error"] is None and each["response"]["status_code"] == 200
        text = peer_text(int(each["custom_id"][1:]), 0, 8)
        assert each["response"]["body"]["choices"][0]["text"] == text
    kept = sdk.files.retrieve(batch.output_file_id or "")
    assert kept.purpose == "batch_output" and kept.bytes == len(sdk.files.content(kept.id).content)


def test_bad_lines_do_not_fail_the_batch(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    lines = [line("same"), "", *(bad for bad, _, _ in BAD_LINES), line("refused", priority=1 << 40), line("good")]
    batch = wait(sdk, start(sdk, jsonl(lines)), over)
    assert batch.status == "completed" and batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(lines) - 1, 2, len(BAD_LINES) + 1)
    assert sorted(each["custom_id"] for each in results(sdk, batch.output_file_id)) == ["good", "same"]
    *unrun, refused = results(sdk, batch.error_file_id)
    assert [(each["custom_id"], each["error"]["code"]) for each in unrun] == [bad[1:] for bad in BAD_LINES]
    assert all(each["response"] is None for each in unrun)
    assert unrun[0]["error"]["message"].startswith("line 3 "), "blank lines count"
    assert (refused["custom_id"], refused["error"], refused["response"]["status_code"]) == ("refused", None, 400)
    direct = httpx.post(f"{sdk.base_url}completions", json=line("", priority=1 << 40)["body"])
    assert refused["response"]["body"] == direct.json()


def test_lines_with_tools_and_forms(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.token_of = script(ids_of('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'))
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}
    tools = {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}
    bad = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}
    route = "/v1/chat/completions"
    lines = [
        {"custom_id": custom_id, "method": "POST", "url": route, "body": chat | fields}
        for custom_id, fields in (
            ("tools", tools),
            ("json", {"response_format": {"type": "json_object"}}),
            ("bad", bad),
        )
    ]
    batch = wait(sdk, start(sdk, jsonl(lines), endpoint=route), over)
    answers = {each["custom_id"]: each["response"]["body"] for each in results(sdk, batch.output_file_id)}
    choice = answers["tools"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert answers["json"]["choices"][0]["finish_reason"] == "stop"
    works = [decode(each.payload) for each in peer.of(Submit)]
    assert len(works) == 2 and all(isinstance(work, Work) and work.params.grammar for work in works)
    (refused,) = results(sdk, batch.error_file_id)
    assert refused["response"]["body"]["error"]["param"] == "response_format"


def test_a_file_without_lines_fails(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    batch = wait(sdk, start(sdk, b"\n \n"), over)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert batch.errors.data[0].code == "empty_file" and batch.output_file_id is None


def test_an_input_that_is_gone_fails_the_batch(tmp_path: Path) -> None:
    settings = [f"data_dir={tmp_path}"]
    with EnginePeer() as peer:
        with FrontendProcess(peer.endpoint, *settings) as frontend, client(frontend) as sdk:
            frontend.wait_until_serving()
            peer.paused = True
            batch = start(sdk, jsonl([line("r")]))
            peer.wait_for(Submit)
            frontend.process.kill()
        (tmp_path / "files" / batch.input_file_id).unlink()
        with FrontendProcess(peer.endpoint, *settings) as frontend, client(frontend) as sdk:
            batch = wait(sdk, batch, over)
            assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
            assert batch.errors.data[0].code == "input_file_missing" and batch.failed_at


def test_requests_are_late_few_at_once_and_in_order_of_prefix(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.paused = True
    texts = [f"{'ab'[number % 2]} long prefix {number}" for number in range(40)]
    lines = [line(text, prompt=text, priority=number % 2) for number, text in enumerate(texts)]
    batch = start(sdk, jsonl(lines))
    first = peer.wait_for(Submit, 16)
    assert {each.priority for each in first} == {PRIORITY}, "those of one prefix, though every other line has it"
    assert httpx.post(f"{sdk.base_url}completions", json={"prompt": "x", "max_tokens": 0, "echo": True}).is_success
    assert len(peer.of(Submit)) == 16
    peer.paused = False
    assert wait(sdk, batch, over).status == "completed"
    assert sorted(each.priority for each in peer.of(Submit)) == [PRIORITY] * 20 + [PRIORITY + 1] * 20


def test_refused_for_now_is_tried_again(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.refusal = (429, "the queue is full", 1)
    batch = start(sdk, jsonl(line(f"r{number}") for number in range(3)))
    peer.wait_for(Submit, 3)
    peer.refusal = None
    batch = wait(sdk, batch, over)
    assert batch.status == "completed" and len(results(sdk, batch.output_file_id)) == 3


def test_cancel_keeps_what_is_done(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.step_seconds = 0.01
    lines = [line(f"r{number}", max_tokens=8 if number < 10 else 5000) for number in range(50)]
    batch = start(sdk, jsonl(lines))
    moved = wait(sdk, batch, lambda batch: batch.request_counts is not None and batch.request_counts.completed == 10)
    assert moved.status == "in_progress"
    assert sdk.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait(sdk, batch, over)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at and batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed) == (10, 40)
    assert {each["custom_id"] for each in results(sdk, batch.output_file_id)} == {f"r{n}" for n in range(10)}
    left = results(sdk, batch.error_file_id)
    assert {each["custom_id"] for each in left} == {f"r{n}" for n in range(10, 50)}
    assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
    assert len({each.request for each in peer.of(Cancel)}) == 16, "what ran does not run on"
    assert sdk.batches.cancel(batch.id).status == "cancelled"


def test_expiry_keeps_what_is_done(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    peer.step_seconds = 0.01
    lines = [line(f"r{number}", max_tokens=8 if number < 10 else 5000) for number in range(50)]
    batch = wait(sdk, start(sdk, jsonl(lines), "4s"), over)
    assert batch.status == "expired" and (batch.expired_at or 0) >= (batch.expires_at or 0) == batch.created_at + 4
    assert {each["custom_id"] for each in results(sdk, batch.output_file_id)} == {f"r{n}" for n in range(10)}
    assert {each["error"]["code"] for each in results(sdk, batch.error_file_id)} == {"batch_expired"}
    with pytest.raises(openai.ConflictError, match="is expired and cannot be cancelled"):
        sdk.batches.cancel(batch.id)


def test_lists_in_pages(sdk: openai.OpenAI, peer: EnginePeer) -> None:
    batches = [start(sdk, jsonl([line("r")])) for _ in range(5)]
    page = sdk.batches.list(limit=2)
    assert [each.id for each in page.data] == [each.id for each in batches[:2:-1]] and page.has_more
    listed = [each.id for each in sdk.batches.list(limit=2)]
    assert listed[:5] == [each.id for each in batches[::-1]] and len(listed) == len(set(listed))
    with pytest.raises(openai.BadRequestError, match="limit: expected `int` <= 100"):
        sdk.batches.list(limit=101)
    with pytest.raises(openai.BadRequestError, match="after: there is no batch"):
        sdk.batches.list(after="batch_none")
    for batch in batches:
        wait(sdk, batch, over)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": "/v1/files"}, "endpoint: expected one of .*/v1/chat/completions, /v1/completions"),
        ({"input_file_id": "file-none"}, "input_file_id: there is no file 'file-none'"),
        ({"completion_window": "soon"}, "completion_window: expected a time such as 24h"),
        ({"completion_window": "91d"}, "completion_window: .* at most 90d"),
        ({"metadata": {"key": 1}}, "metadata"),
        ({"other": 1}, "other: unknown field"),
    ],
)
def test_what_create_refuses(sdk: openai.OpenAI, peer: EnginePeer, changes: dict[str, object], message: str) -> None:
    file = sdk.files.create(file=("in.jsonl", jsonl([line("r")])), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match=message):
        sdk.post("/batches", body=body | changes, cast_to=object)
    with pytest.raises(openai.NotFoundError, match="batch 'batch_none' does not exist"):
        sdk.batches.retrieve("batch_none")


def test_killed_three_times(tmp_path: Path) -> None:
    """Every good line once in the output, every bad one once in the error file."""
    rng = random.Random(5)
    lines: list[dict[str, object] | str] = [line(f"r{number}", seed=number) for number in range(300)]
    bad = set(rng.sample(range(300), 12))
    for number in bad:
        lines[number] = line(f"r{number}", temperature=9) if number % 2 else line(f"r{number}") | {"method": "GET"}
    settings = [f"data_dir={tmp_path}", "batch_items=16"]
    with EnginePeer(step_seconds=0.002) as peer:
        batch = None
        for done in sorted(rng.sample(range(20, 250), 3)):
            with FrontendProcess(peer.endpoint, *settings) as frontend, client(frontend) as sdk:
                frontend.wait_until_serving()
                batch = batch or start(sdk, jsonl(lines))
                wait(sdk, batch, lambda now, done=done: now.request_counts.completed >= done)  # type: ignore[misc]
                frontend.process.kill()
            for kind in ("output", "errors"):
                with (tmp_path / "batches" / f"{batch.id}.{kind}").open("ab") as file:
                    file.write(b'{"id": "torn')
        with FrontendProcess(peer.endpoint, *settings) as frontend, client(frontend) as sdk:
            assert batch is not None
            batch = wait(sdk, batch, over)
            assert batch.status == "completed" and batch.request_counts is not None
            assert batch.request_counts.model_dump() == {"total": 300, "completed": 288, "failed": 12}
            found = results(sdk, batch.output_file_id)
            assert sorted(int(each["custom_id"][1:]) for each in found) == sorted(set(range(300)) - bad)
            for each in found:
                text = peer_text(int(each["custom_id"][1:]), 0, 8)
                assert each["response"]["body"]["choices"][0]["text"] == text
            assert sorted(int(each["custom_id"][1:]) for each in results(sdk, batch.error_file_id)) == sorted(bad)
    assert not list((tmp_path / "batches").iterdir())


def test_sigterm_waits_for_no_batch(tmp_path: Path) -> None:
    """It goes on where it was at the next start."""
    settings = [f"data_dir={tmp_path}", "batch_items=8"]
    with EnginePeer() as peer:
        with FrontendProcess(peer.endpoint, *settings) as frontend, client(frontend) as sdk:
            frontend.wait_until_serving()
            lines = [line(f"r{number}", max_tokens=8 if number < 20 else 64) for number in range(60)]
            peer.step_seconds = 0.1
            batch = start(sdk, jsonl(lines))
            wait(sdk, batch, lambda batch: batch.request_counts is not None and batch.request_counts.completed >= 16)
            frontend.terminate()
            assert frontend.process.wait(5) == 0
        peer.step_seconds = 0
        with FrontendProcess(peer.endpoint, *settings) as frontend, client(frontend) as sdk:
            batch = wait(sdk, batch, over)
            assert batch.status == "completed"
            assert len({each["custom_id"] for each in results(sdk, batch.output_file_id)}) == 60


def test_one_of_two_frontends_runs_them_and_the_other_takes_over(tmp_path: Path) -> None:
    settings = [f"data_dir={tmp_path}", "batch_items=8"]
    with (
        EnginePeer(step_seconds=0.002) as peer,
        FrontendProcess(peer.endpoint, *settings) as one,
        FrontendProcess(peer.endpoint, *settings) as two,
        client(one) as sdk,
        client(two) as other,
    ):
        one.wait_until_serving()
        two.wait_until_serving()
        batch = start(other, jsonl(line(f"r{number}", seed=number) for number in range(200)))
        wait(other, batch, lambda batch: batch.request_counts is not None and batch.request_counts.completed >= 20)
        assert sdk.batches.retrieve(batch.id).status == "in_progress"
        assert len({each.frontend for each in peer.of(Submit)}) == 1
        one.process.kill()
        batch = wait(other, batch, over)
        assert len({each.frontend for each in peer.of(Submit)}) == 2, "started first, it had the lock"
        found = results(other, batch.output_file_id)
        assert sorted(each["custom_id"] for each in found) == sorted(f"r{number}" for number in range(200))
