"""Where the processes of the replicas run: which GPU a stage gets, and which cores lie near it.

A stage sees all GPUs of its replica on this host, so that it can reach their memory, and takes the one whose number
among them TOKA_GPU is. A process with the variable TOKA_CORES keeps to these cores once it has called `take_cores`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toka.config import Config
from toka.sockets import LAST_PORT, check_endpoint, is_tcp

VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU = "TOKA_GPU"
CORES = "TOKA_CORES"
DRIVER = Path("/proc/driver/nvidia/gpus")
PCI = Path("/sys/bus/pci/devices")
QUERY = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
QUERY_SECONDS = 20.0
BUS_ID_LENGTH = len("0000:17:00.0")
"""nvidia-smi writes more zeros before it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    """What CUDA_VISIBLE_DEVICES calls it: a number, or an identifier such as GPU-1234."""
    bus: str = ""
    """Its place on the PCI bus, in lower case; empty where the machine does not tell."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one replica runs: variables for the environments of its processes, and the threads of a stage."""

    manager: dict[str, str] = field(default_factory=dict)
    stages: list[dict[str, str]] = field(default_factory=list)
    threads: int = 0
    """0: as many as a stage thinks right."""


def own_stages(config: Config) -> range:
    """The stages of this node; ValueError, with the numbers, where the settings do not fit each other."""
    stages = config.pp_size * config.tp_size
    if config.node_rank >= config.nodes:
        raise ValueError(f"node_rank: {config.node_rank}, but nodes={config.nodes}, and they count from 0")
    if config.nodes == 1:
        if config.rendezvous:
            raise ValueError("rendezvous: is for nodes=2 or more")
        return range(stages)
    if not config.rendezvous:
        raise ValueError(f"rendezvous: nodes={config.nodes} need one, tcp://HOST:PORT of the host of node_rank=0")
    if not config.keys:
        # Whoever connects to a socket for plans would get some of them.
        raise ValueError(f"keys: nodes={config.nodes} need them, on loopback, too (see toka-keygen)")
    if not is_tcp(check_endpoint(config.rendezvous, config.keys)):
        raise ValueError(f"rendezvous: {config.rendezvous}: expected tcp://HOST:PORT")
    last = int(config.rendezvous.rsplit(":", 1)[1]) + 2 + stages
    if last > LAST_PORT:
        raise ValueError(f"rendezvous: {config.rendezvous}: the ports behind it would go to {last}")
    if config.pp_size % config.nodes:
        raise ValueError(f"nodes: {config.nodes} does not divide pp_size={config.pp_size}: a node has whole stages")
    each = stages // config.nodes
    return range(config.node_rank * each, (config.node_rank + 1) * each)


def places(config: Config, replicas: int) -> list[Place]:
    """A place for each of `replicas`; ValueError, with the numbers, where there are too few GPUs.

    Of the stages that are to run on this host, k of replica i gets number i * stages + k of its GPUs.
    """
    stages = len(own_stages(config))
    there = [] if config.device == "cpu" else gpus()
    if not there and config.device != "cuda":
        return [Place({}, [{}] * stages, config.threads or _threads(replicas * stages))] * replicas
    if len(there) < replicas * stages:
        sizes = f"dp_size={replicas} pp_size={config.pp_size} tp_size={config.tp_size}"
        raise ValueError(f"{sizes} needs {replicas * stages} GPUs, {len(there)} are there")
    return [_place(there[first : first + stages], config) for first in range(0, replicas * stages, stages)]


def _place(own: Sequence[Gpu], config: Config) -> Place:
    near = [near_cores(gpu.bus) for gpu in own]
    # Next to all of the replica's GPUs, or to none: then anywhere.
    manager = set().union(*near) if all(near) else set()
    visible = {VISIBLE: ",".join(gpu.name for gpu in own)}
    stages = [visible | {GPU: str(number)} | _keep_to(cores) for number, cores in enumerate(near)]
    return Place(_keep_to(manager), stages, config.threads)


def _threads(stages: int) -> int:
    """Of each of so many stages that share this process's cores; one alone finds out for itself."""
    return max(1, len(os.sched_getaffinity(0)) // stages) if stages > 1 else 0


def gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Those this process may use, in order: as CUDA_VISIBLE_DEVICES says, or all of the machine."""
    there = _of_driver() or _of_tool()
    if VISIBLE not in environ:
        return there
    found = []
    for name in map(str.strip, environ[VISIBLE].split(",")):
        if name in ("", "-1"):
            # CUDA, too, looks no further.
            break
        named = [gpu for number, gpu in enumerate(there) if name == str(number) or gpu.name.startswith(name)]
        found.append(Gpu(name, named[0].bus if named else ""))
    return found


def _of_driver() -> list[Gpu]:
    """The GPUs the driver lists in files, in the order of the bus; none where it does not name each."""
    found = []
    for folder in sorted(DRIVER.iterdir()) if DRIVER.is_dir() else ():
        uuid = ""
        with contextlib.suppress(OSError):
            lines = (folder / "information").read_text(errors="replace").splitlines()
            uuid = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("GPU UUID")), "")
        if not uuid or "?" in uuid:
            return []
        found.append(Gpu(uuid, folder.name.lower()))
    return found


def _of_tool() -> list[Gpu]:
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in answer.stdout.splitlines() if ", " in line]
    return [Gpu(uuid, bus.lower()[-BUS_ID_LENGTH:]) for uuid, bus in rows]


def near_cores(bus: str) -> set[int]:
    """Those of this process's cores that lie near the GPU at `bus`; none where that is unknown or no core is far."""
    allowed = os.sched_getaffinity(0)
    try:
        near = allowed & parse_cores((PCI / bus / "local_cpulist").read_text()) if bus else set()
    except (OSError, ValueError):
        return set()
    return set() if near == allowed else near


def parse_cores(text: str) -> set[int]:
    """The numbers in a list such as "0-3,8"; ValueError where it is none."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _keep_to(cores: Collection[int]) -> dict[str, str]:
    return {CORES: ",".join(map(str, sorted(cores)))} if cores else {}


def take_cores() -> None:
    """Keep to the cores that TOKA_CORES names, if it is set. Call before there are threads: later ones inherit it."""
    if cores := parse_cores(os.environ.pop(CORES, "")):
        os.sched_setaffinity(0, cores)
