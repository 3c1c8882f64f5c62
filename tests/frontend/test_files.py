"""Files through the `openai` client and as raw forms."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.frontend.test_batches import client
from tests.support.batches import jsonl, line, over, results, start, wait
from tests.support.engine_peer import EnginePeer
from tests.support.frontend_process import FrontendProcess
from toka.messages import Submit

MAX_FILE = 3 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "data"


@pytest.fixture(scope="module")
def keeping(folder: Path) -> Iterator[tuple[EnginePeer, FrontendProcess]]:
    with EnginePeer() as peer:
        settings = [f"data_dir={folder}", f"max_file_size={MAX_FILE}"]
        with FrontendProcess(peer.endpoint, *settings) as frontend:
            frontend.wait_until_serving()
            yield peer, frontend


@pytest.fixture
def kept(keeping: tuple[EnginePeer, FrontendProcess]) -> Iterator[openai.OpenAI]:
    with client(keeping[1]) as sdk:
        yield sdk


def test_what_was_uploaded_comes_back(kept: openai.OpenAI, folder: Path) -> None:
    content = bytes(range(256)) * (MAX_FILE // 256)
    before = int(time.time())
    file = kept.files.create(
        file=("näme.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.filename, file.bytes, file.purpose) == ("näme.jsonl", len(content), "batch")
    assert file.created_at >= before and file.expires_at == file.created_at + 3600
    assert kept.files.retrieve(file.id) == file
    assert kept.files.content(file.id).content == content
    part = httpx.get(f"{kept.base_url}files/{file.id}/content", headers={"Range": "bytes=5-8"})
    assert (part.status_code, part.content) == (206, content[5:9])
    assert kept.files.delete(file.id).deleted
    for call in (kept.files.retrieve, kept.files.content, kept.files.delete):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            call(file.id)
    assert not list((folder / "files").iterdir())


def test_lists_in_pages_either_way(kept: openai.OpenAI) -> None:
    made = [kept.files.create(file=(f"{number}.jsonl", b"x"), purpose="batch").id for number in range(5)]
    assert [each.id for each in kept.files.list(limit=2)] == made[::-1]
    assert [each.id for each in kept.files.list(limit=2, order="asc")] == made
    page = kept.files.list(limit=3, order="asc", after=made[1])
    assert [each.id for each in page.data] == made[2:] and page.has_more is False
    assert len(kept.files.list(purpose="batch").data) == 5 and not kept.files.list(purpose="batch_output").data
    url = f"{kept.base_url}files"
    for query, name in (("limit=0", "limit"), ("order=up", "order"), ("after=file-none", "after"), ("x=1", "x")):
        refused = httpx.get(f"{url}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    for each in made:
        kept.files.delete(each)


@pytest.mark.parametrize(
    ("files", "data", "status", "param"),
    [
        ({"file": ("a", b"x" * (MAX_FILE + 1))}, {"purpose": "batch"}, 413, "file"),
        ({"file": ("a", b"x" * (MAX_FILE + 200_000))}, {"purpose": "batch"}, 413, "file"),
        ({"file": ("a", b"")}, {"purpose": "batch"}, 400, "file"),
        ({"other": ("a", b"x")}, {"purpose": "batch"}, 400, "other"),
        ({"file": ("a", b"x")}, {}, 400, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "vision"}, 400, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "b" * 2000}, 400, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "batch", "expires_after[seconds]": "3600"}, 400, "expires_after[anchor]"),
        (
            {"file": ("a", b"x")},
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            400,
            "expires_after[seconds]",
        ),
    ],
)
def test_what_uploads_are_refused(
    kept: openai.OpenAI,
    folder: Path,
    files: dict[str, tuple[str, bytes]],
    data: dict[str, str],
    status: int,
    param: str,
) -> None:
    answer = httpx.post(f"{kept.base_url}files", files=files, data=data)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert not kept.files.list().data and not list((folder / "files").iterdir())


def test_broken_forms(kept: openai.OpenAI, folder: Path) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    for headers, content in (
        ({}, b"{}"),
        (form, b"nothing"),
        (form, b"--b\r\n" + b"x" * 99_999),
        (form, b'--b\r\nContent-Disposition: x; name="file"\r\n'),
    ):
        answer = httpx.post(f"{kept.base_url}files", headers=headers, content=content)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert not list((folder / "files").iterdir())


def test_an_upload_that_ends_in_between_leaves_nothing(kept: openai.OpenAI, folder: Path) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    there, ended = threading.Event(), threading.Event()

    def pieces() -> Iterator[bytes]:
        yield head + b"x" * 2_000_000
        there.set()
        ended.wait(10)
        raise RuntimeError("the client goes")

    def send() -> None:
        with pytest.raises(RuntimeError, match="the client goes"):
            httpx.post(f"{kept.base_url}files", headers=form, content=pieces())

    form = {"Content-Type": "multipart/form-data; boundary=b"}
    thread = threading.Thread(target=send)
    thread.start()
    assert there.wait(10)
    _until(lambda: bool(list((folder / "files").iterdir())))
    ended.set()
    thread.join(10)
    _until(lambda: not list((folder / "files").iterdir()))


def test_a_file_that_a_batch_reads_stays(kept: openai.OpenAI, keeping: tuple[EnginePeer, FrontendProcess]) -> None:
    peer, _ = keeping
    peer.paused = True
    batch = start(kept, jsonl([line("r")]))
    peer.wait_for(Submit)
    with pytest.raises(openai.ConflictError, match=f"is read by {batch.id}"):
        kept.files.delete(batch.input_file_id)
    peer.paused = False
    batch = wait(kept, batch, over)
    for file in (batch.input_file_id, batch.output_file_id or ""):
        assert kept.files.delete(file).deleted


def test_a_disk_that_takes_no_more(kept: openai.OpenAI, keeping: tuple[EnginePeer, FrontendProcess]) -> None:
    """An upload is refused in a sentence, and a batch waits until there is room again."""
    peer, frontend = keeping
    process = psutil.Process(frontend.process.pid)
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    peer.paused = True
    batch = start(kept, jsonl(line(f"r{number}") for number in range(20)))
    peer.wait_for(Submit, 20)
    process.rlimit(psutil.RLIMIT_FSIZE, (4096, no_limit[1]))
    try:
        answer = httpx.post(f"{kept.base_url}files", files={"file": ("a", b"x" * 100_000)}, data={"purpose": "batch"})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 500 and message.startswith("data_dir: /") and message.endswith("File too large")
        peer.paused = False
        _until(lambda: any("batches wait" in line for line in frontend.lines))
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, no_limit)
    batch = wait(kept, batch, over)
    assert batch.status == "completed"
    assert len({each["custom_id"] for each in results(kept, batch.output_file_id)}) == 20


def test_off_without_data_dir(http: httpx.Client) -> None:
    for method, path in (("GET", "files"), ("POST", "batches"), ("GET", "files/file-x/content")):
        answer = http.request(method, f"/v1/{path}", json={})
        assert answer.status_code == 501 and "data_dir" in answer.json()["error"]["message"]


def test_a_data_dir_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(AssertionError, match=r"data_dir: .*/file/data: Not a directory"),
        FrontendProcess("tcp://127.0.0.1:1", f"data_dir={tmp_path}/file/data"),
    ):
        pass


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
