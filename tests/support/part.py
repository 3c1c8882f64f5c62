"""A part of a few lines for tests of the supervisor: `python -m tests.support.part behaviour [seconds]`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from toka import process
from toka.config import Config


def main() -> None:
    behaviour, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    process.begin("test", f"toka: test {behaviour}", Config())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    process.progress("half way", 0.5)
    match behaviour:
        case "fail":
            process.fail("the reason, in one sentence")
        case "crash":
            raise RuntimeError("a crash")
        case "hang":
            time.sleep(600)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "mother":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.ready(behaviour)
    time.sleep(seconds or 600)
    sys.exit(1)


if __name__ == "__main__":
    main()
