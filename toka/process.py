"""What every part of Toka does as a process: its command line, its name, its logs, what it tells its supervisor.

    def main() -> None:
        config = command_line("toka-broker", "the queue between frontends and replicas", "broker")
        begin("broker", "toka: broker", config)
        ...
        ready()

Whoever starts a part (`toka.child`) gives it two variables: TOKA_NOTIFY_FD, a pipe for the JSON lines
`{"progress": fraction, "text": ...}`, `{"ready": text}` and `{"fail": sentence}`; and TOKA_PARENT, its own
process id, with which the part dies. SIGTERM asks a part to drain and to exit with 0. The launcher itself is
started in this way by `toka.LLM` and `toka-batch`; its progress is that of its parts, which it names.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

from toka import config as settings
from toka import log as logs

HOME = Path(__file__).resolve().parent.parent
"""The folder that holds `toka` and, beside it, the packages of the parts."""
PACKAGES = ("frontend", "broker", "workers")
NOTIFY_FD = "TOKA_NOTIFY_FD"
PARENT = "TOKA_PARENT"
USAGE_ERROR = 2
"""Exit status for a command line that is wrong; a part that cannot go on exits with 1."""

_PR_SET_PDEATHSIG = 1
_GC_THRESHOLDS = (100_000, 20, 20)
"""With thousands of requests in flight, collections took a sixth of a frontend's time at the usual ones."""
_FILES_WANTED = 4096
_FILES_MOST = 1 << 20

log = logging.getLogger(__name__)
_notify_fd: int | None = None


def command_line(
    program: str, summary: str, part: str | None = None, args: Sequence[str] | None = None
) -> settings.Config:
    """The Config of this start; answers `--help` and `--version`, and ends with status 2 where a setting is wrong."""
    args = sys.argv[1:] if args is None else args
    if "--help" in args or "-h" in args:
        print(settings.help_text(program, summary, part))
        sys.exit(0)
    if "--version" in args:
        print(f"{program} {version()}")
        sys.exit(0)
    try:
        return settings.load(args, part)
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def version() -> str:
    """The version of Toka, also from a checkout that is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("toka-engine")
    import tomllib

    return str(tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["version"])


def begin(part: str, title: str, config: settings.Config, orphaned: signal.Signals = signal.SIGKILL) -> None:
    """Become `part` (one word, for the logs), shown by `ps` as `title`, e.g. "toka: stage r0.0".

    `orphaned` is the signal that the process gets when the one that started it ends. Call first of all in main(),
    from the main thread. Ends the process with one sentence if a package of the parts that is imported does not
    lie beside `toka`.
    """
    global _notify_fd
    _open_standard_streams()
    descriptor, parent = os.environ.pop(NOTIFY_FD, ""), os.environ.pop(PARENT, "")
    if descriptor:
        _notify_fd = int(descriptor)
        os.set_inheritable(_notify_fd, False)
    if parent:
        _die_with(int(parent), orphaned)
    logs.configure(part, config.log_level)
    setproctitle.setproctitle(title)
    for name in PACKAGES:
        if name in sys.modules:
            _check_place(name)


def _open_standard_streams() -> None:
    """Have those that the process was started without (`2>&-`) lead to nowhere."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # As typed they are always there.
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def progress(text: str, fraction: float) -> None:
    """Tell how far the start is: `text` says what is being done, `fraction` is from 0 to 1."""
    if not _notify({"progress": fraction, "text": text}):
        log.info(text, extra={"done": f"{fraction:.0%}"})


def supervised() -> bool:
    """Whether somebody hears what this process tells."""
    return _notify_fd is not None


def pass_on(part: str, text: str, fraction: float) -> None:
    """Tell how far the start of a part is that this process has started."""
    _notify({"part": part, "progress": fraction, "text": text})


def settle() -> None:
    """Call when everything is loaded that stays: the garbage collector looks at none of it again, and seldom at
    the rest, of which there is much and little in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def ready(text: str = "") -> None:
    """Tell, once, that this part serves. `text`: what a user should know (of a frontend: its base URL)."""
    if not _notify({"ready": text}):
        log.info("ready", extra={"at": text} if text else {})


def explain(sentence: str) -> None:
    """Tell the user in one sentence why this process is about to end."""
    if not _notify({"fail": sentence}):
        log.error(sentence)


def fail(sentence: str) -> NoReturn:
    """End with status 1, telling why in one sentence for the user."""
    explain(sentence)
    sys.exit(1)


def raise_file_limit(wanted: int = _FILES_MOST) -> None:
    """Lift the limit on open files as far as it goes, up to `wanted`, and warn where that is not far: each connection
    takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < min(wanted, _FILES_WANTED):
        log.warning("few files may be open at once; raise `ulimit -n`", extra={"limit": soft})


def _notify(line: dict[str, Any]) -> bool:
    if _notify_fd is None:
        return False
    # A supervisor that is gone takes this process with it; there is nobody left to tell.
    with contextlib.suppress(OSError):
        os.write(_notify_fd, json.dumps(line).encode() + b"\n")
    return True


def _die_with(parent: int, number: signal.Signals) -> None:
    """Get a signal when the process `parent`, which started this one, ends in whatever way (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        # It ended before the call above.
        os._exit(1)


def _check_place(name: str) -> None:
    paths = [Path(path).resolve() for path in sys.modules[name].__path__]
    if paths != [HOME / name]:
        fail(f"{paths[0]} is another package named {name!r}: Toka's own lies beside toka in {HOME}")
