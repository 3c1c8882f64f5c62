"""What a measurement ran on, and its figures as Markdown."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from toka.process import HOME, version

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Goal:
    """A figure and what is wanted of it."""

    what: str
    value: float
    wanted: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted


def context(settings: Any) -> dict[str, Any]:
    """Everything needed to run a measurement again, and to judge its figures."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "tools.bench.compare", *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "changed_since": bool(_git("status", "--porcelain")),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "toka": version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "aiohttp", "pyzmq")},
        },
        "settings": asdict(settings),
        "busy": [],
    }


def hardware() -> dict[str, Any]:
    """Of /proc/cpuinfo: the processor, its cores and the instructions that matter; and the memory in GB."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    return {
        "processor": fields.get("model name", platform.processor()),
        "model": fields.get("model", ""),
        "cores": psutil.cpu_count(),
        "instructions": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
    }


def markdown(record: dict[str, Any]) -> str:
    """The record as docs/benchmarks.md shows it."""
    return "\n".join([*_setting(record), "", *_servers(record), "", *_generate(record), *_goals(record)])


def _setting(record: dict[str, Any]) -> list[str]:
    machine, settings = record["hardware"], record["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    changed = ", with changes," if record["changed_since"] else ""
    return [
        f"{record['when'][:10]}, commit {record['commit'][:12]}{changed} on {machine['processor']}, "
        f"{machine['cores']} cores ({', '.join(machine['instructions'])}), {machine['memory_gb']} GB; {versions}.",
        "",
        f"`{record['command']}`: SmolLM2-135M-Instruct in bfloat16, {settings['clients']} clients at once, "
        f"{settings['input_tokens']} tokens in, {settings['output_tokens']} out, "
        f"temperature {settings['temperature']:g}; medians of the rounds.",
    ]


def _servers(record: dict[str, Any]) -> list[str]:
    lines = [
        "| server | output tokens/s (slowest-fastest round) | TTFT, ms | ITL, ms | ready, s | Toka's tokens/s are |",
        "|---|---|---|---|---|---|",
    ]
    own = record["servers"]["toka"]["serve"]["tokens_per_second"]
    for name, server in record["servers"].items():
        serve = server["serve"]
        ratio = "" if name == "toka" else f"{own / serve['tokens_per_second']:.2f} times as many"
        lines.append(
            f"| {name} | {serve['tokens_per_second']:.0f} ({serve['slowest']:.0f}-{serve['fastest']:.0f}) "
            f"| {serve['ttft'] * 1e3:.0f} | {serve['itl'] * 1e3:.1f} | {server['ready_seconds']:.1f} | {ratio} |"
        )
    return lines


def _generate(record: dict[str, Any]) -> list[str]:
    if "generate" not in record:
        return []
    lines = ["| batch | `generate`, tokens/s | toka, one request, not streamed, tokens/s |", "|---|---|---|"]
    for batch, speeds in record["generate"].items():
        lines.append(f"| {batch} | {speeds['generate']:.0f} | {speeds['toka']:.0f} |")
    return [*lines, ""]


def _goals(record: dict[str, Any]) -> list[str]:
    lines = ["| measure | figure | wanted | met |", "|---|---|---|---|"]
    for goal in record["goals"]:
        bound, met = "at most" if goal["at_most"] else "at least", "yes" if goal["met"] else "no"
        lines.append(f"| {goal['what']} | {goal['value']:.2f} | {bound} {goal['wanted']:g} | {met} |")
    return lines


def _git(*words: str) -> str:
    result = subprocess.run(["git", *words], cwd=HOME, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else "unknown"
