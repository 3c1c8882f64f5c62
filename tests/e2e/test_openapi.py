"""/openapi.json against the real server: what schemathesis makes of it, and the life of a file and a batch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec

from frontend.answer_schema import BatchList, FileDeleted, FileList
from frontend.records import Batch, File
from tests.support.batches import COMPLETIONS, jsonl, line
from tests.support.server import Server, until

EXAMPLES = 10
"""Random requests of each operation, beside the hundreds that follow from the document."""
UNTESTED = "positive_data_acceptance"
"""Fields depend on one another, on the model and on what is stored: what the document allows may still be refused."""


def test_schemathesis_finds_nothing(small: Server, tmp_path: Path) -> None:
    """No 5xx, no status, field, header or type of content that is not described, nothing wrong that is accepted."""
    document = f"{small.url}/openapi.json"
    operations = sum(len(methods) for methods in httpx.get(document).json()["paths"].values())
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", document),
        *("--checks", "all", "--exclude-checks", UNTESTED, "--warnings", "off"),
        *("--generation-deterministic", "--max-examples", str(EXAMPLES)),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"Tested: +{operations - 1}\n", done.stdout), "all but the one that gives the document"
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None and int(cases[1]) > 500, done.stdout
    assert "a request failed" not in small.output


def test_files_and_batches_are_as_they_are_described(small: Server) -> None:
    with httpx.Client(base_url=f"{small.url}/v1", timeout=30) as http:
        content = jsonl([line("good"), line("bad", max_tokens=-1)])
        form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = shaped(http.post("/files", files={"file": ("in.jsonl", content)}, data=form), File)
        assert http.get(f"/files/{file.id}/content").content == content
        assert shaped(http.get(f"/files/{file.id}"), File) == file
        asked = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "1h", "metadata": {"a": "b"}}
        batch = shaped(http.post("/batches", json=asked), Batch)
        until(lambda: shaped(http.get(f"/batches/{batch.id}"), Batch).completed_at is not None, 20, "it is completed")
        assert shaped(http.post("/files", files={"file": ("e", b"\n")}, data={"purpose": "batch"}), File).bytes == 1
        assert shaped(http.get("/batches", params={"limit": 1}), BatchList).data[0].error_file_id is not None
        assert shaped(http.get("/files", params={"order": "asc"}), FileList).has_more is False
        assert shaped(http.delete(f"/files/{file.id}"), FileDeleted).deleted


def shaped(answer: httpx.Response, kind: type[Any]) -> Any:
    """The answer as a `kind`, of which it has all fields and no other."""
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {each.encode_name for each in msgspec.structs.fields(kind)}
    return msgspec.json.decode(answer.content, type=kind)
