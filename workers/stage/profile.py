"""The kernels of the first steps, for the trace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from toka.trace import DEVICE_TRACK, ON_DEVICE, ON_HOST, Recorder


class Profile:
    """Has torch.profiler look at `steps` steps. That slows them, and its end holds up the next one."""

    def __init__(self, trace: Recorder, steps: int, device: torch.device) -> None:
        self._trace, self._left = trace, steps if trace.on else 0
        kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self._profiler = profile(activities=[kind]) if self._left else None
        if self._profiler is not None:
            self._profiler.start()

    def stepped(self) -> None:
        """A step was launched: after the last one the profiler is stopped."""
        self._left -= 1
        if self._left == 0:
            self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            with self._trace.span("stop the profiler"):
                self._profiler.stop()

    def end(self) -> None:
        """Take what was recorded into the trace; call at the end, since it takes seconds."""
        if self._profiler is None:
            return
        if self._left > 0:
            self._stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernels.json")
            self._profiler.export_chrome_trace(str(path))
            made = json.loads(path.read_text())
        base, streams = made["baseTimeNanoseconds"], set[int]()
        for event in made["traceEvents"]:
            if (category := event.get("cat")) not in (*ON_DEVICE, ON_HOST) or event["ph"] != "X":
                continue
            track = event["tid"]
            if category in ON_DEVICE:
                streams.add(track)
                track += DEVICE_TRACK + 1
            began = base + round(event["ts"] * 1000)
            ended = began + round(event["dur"] * 1000)
            self._trace.add_wall(event["name"], began, ended, track=track, category=category)
        for stream in streams:
            self._trace.name_track(f"GPU stream {stream}", DEVICE_TRACK + 1 + stream)
