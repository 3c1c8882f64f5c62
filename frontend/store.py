"""Files and batches on disk: SQLite for what is said about them, and a folder for what they hold.

A result exists once the transaction that takes its line off `lines` has been committed; the bytes were
appended to the batch's output and synced before. What a file has beyond the length that the transaction
names was written by a process that died, and is cut off by the next one that appends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from frontend.records import ACTIVE, Batch, File, Progress, now

BUSY_SECONDS = 30.0
"""Another frontend may hold the database for so long."""
CACHE_KIB = 32_768
"""Of the database in memory: custom_ids of a million lines are looked up in no order."""
PART = ".part"
"""The end of the name of a file that is being uploaded."""
STALE_SECONDS = 3600
"""After which a file that nothing speaks of was left by a process that died."""

_TABLES = """
CREATE TABLE IF NOT EXISTS files (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL, expires INTEGER, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL, input TEXT NOT NULL, document BLOB NOT NULL, progress BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE TABLE IF NOT EXISTS lines (batch TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL,
    size INTEGER NOT NULL, key BLOB NOT NULL, PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS lines_by_key ON lines (batch, key);
"""

P = ParamSpec("P")
T = TypeVar("T")


class Line(NamedTuple):
    """Where a line of an input that is not done lies, and what its custom_id hashes to."""

    number: int
    start: int
    size: int
    key: bytes


class Store:
    """Everything under data_dir. Its methods block: `call` runs them, one after another, in a thread.

    They raise OSError and sqlite3.Error; `explain` makes a sentence of either.
    """

    def __init__(self, folder: str) -> None:
        """ValueError, in one sentence, where the folder cannot be used."""
        self.folder = Path(folder).absolute()
        self._thread = ThreadPoolExecutor(1, "store")
        try:
            for each in (self.folder, self.folder / "files", self.folder / "batches"):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(self.folder):
                self._database = self._open()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(explain(error, self.folder)) from None

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(
            self.folder / "state.sqlite", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        database.executescript(_TABLES)
        return database

    async def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: method(*args, **kwargs))

    def close(self) -> None:
        self._thread.shutdown()
        self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield self._database
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    # --- Files

    def path(self, file: str) -> Path:
        """Where a file's content lies."""
        return self.folder / "files" / file

    def add_file(self, file: File, content: Path) -> None:
        """Take a file in. `content` is moved, unless an earlier call, whose process died, has moved it."""
        values = (file.id, file.purpose, file.expires_at, msgspec.json.encode(file))
        if content.exists():
            _sync(content)
            content.rename(self.path(file.id))
            _sync(self.folder / "files")
        with self._transaction() as database:
            database.execute("INSERT OR IGNORE INTO files (id, purpose, expires, document) VALUES (?, ?, ?, ?)", values)

    def file(self, file: str) -> File | None:
        row = self._database.execute(
            "SELECT document FROM files WHERE id = ? AND (expires IS NULL OR expires > ?)", (file, now())
        ).fetchone()
        return msgspec.json.decode(row[0], type=File) if row else None

    def files(self, after: str, limit: int, descending: bool, purpose: str) -> list[File] | None:
        """Up to `limit` files behind `after` (empty: from the first); None where there is no such file."""
        where, values = "(expires IS NULL OR expires > ?)", list[Any]([now()])
        if purpose:
            where, values = where + " AND purpose = ?", [*values, purpose]
        rows = self._page("files", where, values, after, limit, descending)
        return None if rows is None else [msgspec.json.decode(row, type=File) for row in rows]

    def delete_file(self, file: str) -> str:
        """Delete a file, and return nothing; or the id of a batch that still reads it."""
        with self._transaction() as database:
            marks = ", ".join("?" * len(ACTIVE))
            used = database.execute(
                f"SELECT id FROM batches WHERE input = ? AND status IN ({marks})", (file, *ACTIVE)
            ).fetchone()
            if used:
                return str(used[0])
            database.execute("DELETE FROM files WHERE id = ?", (file,))
        self.path(file).unlink(missing_ok=True)
        return ""

    def sweep(self) -> None:
        """Delete files that have expired, and content that a process left behind when it died."""
        if self._database.execute("SELECT 1 FROM batches WHERE status = 'finalizing'").fetchone():
            return  # Its output may have been moved already, and is not known yet.
        for (file,) in self._database.execute("SELECT id FROM files WHERE expires <= ?", (now(),)).fetchall():
            self.delete_file(file)
        known = "SELECT 1 FROM files WHERE id = ?"
        for path in (self.folder / "files").iterdir():
            with contextlib.suppress(FileNotFoundError):
                old = now() - path.stat().st_mtime > STALE_SECONDS
                if old and not self._database.execute(known, (path.name,)).fetchone():
                    path.unlink()

    def _page(
        self, table: str, where: str, values: Sequence[Any], after: str, limit: int, descending: bool
    ) -> list[bytes] | None:
        if after:
            row = self._database.execute(f"SELECT seq FROM {table} WHERE id = ?", (after,)).fetchone()
            if row is None:
                return None
            where, values = f"{where} AND seq {'<' if descending else '>'} ?", [*values, row[0]]
        query = f"SELECT document FROM {table} WHERE {where} ORDER BY seq {'DESC' if descending else 'ASC'} LIMIT ?"
        return [row[0] for row in self._database.execute(query, (*values, limit))]

    # --- Batches

    def add_batch(self, batch: Batch, progress: Progress) -> bool:
        """Whether its input is there: nothing is added where it is not."""
        with self._transaction() as database:
            if self.file(batch.input_file_id) is None:
                return False
            values = (batch.id, batch.status, batch.input_file_id, *map(msgspec.json.encode, (batch, progress)))
            database.execute(
                "INSERT INTO batches (id, status, input, document, progress) VALUES (?, ?, ?, ?, ?)", values
            )
        return True

    def batch(self, batch: str) -> Batch | None:
        found = self._batch(batch)
        return found[0] if found else None

    def progress(self, batch: str) -> tuple[Batch, Progress]:
        """Of a batch that is there."""
        found = self._batch(batch)
        assert found is not None, "batches are never deleted"
        return found

    def batches(self, after: str, limit: int) -> list[Batch] | None:
        """Up to `limit` batches behind `after`, newest first; None where there is no such batch."""
        rows = self._page("batches", "1", (), after, limit, True)
        return None if rows is None else [msgspec.json.decode(row, type=Batch) for row in rows]

    def active(self) -> list[tuple[str, str]]:
        """Id and status of the batches that are not over, the oldest first."""
        marks = ", ".join("?" * len(ACTIVE))
        return self._database.execute(
            f"SELECT id, status FROM batches WHERE status IN ({marks}) ORDER BY seq", ACTIVE
        ).fetchall()

    def change(self, batch: str, change: Callable[[Batch, Progress], None]) -> Batch | None:
        """Change a batch in one transaction; the batch as it is then, None where there is none."""
        with self._transaction():
            found = self._batch(batch)
            if found is None:
                return None
            change(*found)
            self._write(*found)
            return found[0]

    def append(
        self,
        batch: str,
        output: bytes,
        errors: bytes,
        change: Callable[[Batch, Progress], None],
        *,
        done: Sequence[int] = (),
        new: Sequence[Line] = (),
    ) -> None:
        """Append whole lines to the output and the error file; take `done` off the lines to do, and put `new` on.

        All of it happens, or nothing.
        """
        with self._transaction() as database:
            found = self._batch(batch)
            assert found is not None, "batches are never deleted"
            _, progress = found
            progress.output_bytes = _append(self.output(batch), progress.output_bytes, output)
            progress.error_bytes = _append(self.errors(batch), progress.error_bytes, errors)
            change(*found)
            self._write(*found)
            database.executemany("DELETE FROM lines WHERE batch = ? AND number = ?", ((batch, each) for each in done))
            database.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", ((batch, *each) for each in new))

    def has_key(self, batch: str, key: bytes) -> bool:
        """Whether a line to do has the key."""
        query = "SELECT 1 FROM lines WHERE batch = ? AND key = ?"
        return self._database.execute(query, (batch, key)).fetchone() is not None

    def lines(self, batch: str, after: int, limit: int) -> list[Line]:
        """Up to `limit` lines to do that come behind the line `after`."""
        query = "SELECT number, start, size, key FROM lines WHERE batch = ? AND number > ? ORDER BY number LIMIT ?"
        return [Line(*row) for row in self._database.execute(query, (batch, after, limit))]

    def forget_lines(self, batch: str) -> None:
        """No line is to do any more."""
        with self._transaction() as database:
            database.execute("DELETE FROM lines WHERE batch = ?", (batch,))

    def publish(self, file: File, content: Path) -> None:
        """Take in what a batch has written, the first `file.bytes` of it."""
        if content.exists():
            os.truncate(content, file.bytes)
        self.add_file(file, content)

    def output(self, batch: str) -> Path:
        """Where the output of a batch that is not over lies."""
        return self.folder / "batches" / f"{batch}.output"

    def errors(self, batch: str) -> Path:
        return self.folder / "batches" / f"{batch}.errors"

    def _batch(self, batch: str) -> tuple[Batch, Progress] | None:
        row = self._database.execute("SELECT document, progress FROM batches WHERE id = ?", (batch,)).fetchone()
        if row is None:
            return None
        return msgspec.json.decode(row[0], type=Batch), msgspec.json.decode(row[1], type=Progress)

    def _write(self, batch: Batch, progress: Progress) -> None:
        values = (batch.status, *map(msgspec.json.encode, (batch, progress)), batch.id)
        self._database.execute("UPDATE batches SET status = ?, document = ?, progress = ? WHERE id = ?", values)


def explain(error: OSError | sqlite3.Error, folder: Path) -> str:
    """One sentence about what went wrong in data_dir."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"data_dir: {folder}: {reason}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other process is in here: two cannot turn a new database to WAL at once."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _append(path: Path, size: int, data: bytes) -> int:
    """Put `data` behind the first `size` bytes, and nothing behind it; the new size."""
    if not data:
        return size
    if not path.exists():
        path.touch(mode=0o600)
        _sync(path.parent)
    with path.open("r+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return size + len(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
