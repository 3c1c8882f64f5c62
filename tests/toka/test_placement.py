"""Which GPUs and cores the processes of replicas get, from what a machine's files and tools say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import environment
from toka import placement
from toka.config import Config
from toka.placement import Gpu, Place, gpus, near_cores, parse_cores, places

CORES = set(range(8))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight cores and no GPU, whatever runs the test."""
    monkeypatch.setattr(placement, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(placement, "PCI", tmp_path / "pci")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: CORES)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def add_gpus(machine: Path, near: list[str]) -> None:
    """One for each list of cores near it, on buses that are not in the order they were found in."""
    for number, cores in reversed(list(enumerate(near))):
        driver, pci = machine / "gpus" / f"0000:{number}B:00.0", machine / "pci" / f"0000:{number}b:00.0"
        driver.mkdir(parents=True)
        pci.mkdir(parents=True)
        (driver / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{number}{number}\n")
        (pci / "local_cpulist").write_text(f"{cores}\n")


def add_tool(machine: Path, script: str) -> None:
    (machine / "bin").mkdir()
    (machine / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (machine / "bin" / "nvidia-smi").chmod(0o755)


def test_gpus_are_those_the_driver_lists(machine: Path):
    add_gpus(machine, ["0-3", "4-7"])
    assert gpus() == [Gpu("GPU-00", "0000:0b:00.0"), Gpu("GPU-11", "0000:1b:00.0")]


def test_gpus_are_those_the_tool_lists_where_the_driver_does_not_name_them(machine: Path):
    assert gpus() == []
    add_gpus(machine, [""])
    (machine / "gpus" / "0000:0B:00.0" / "information").write_text("GPU UUID: GPU-????????\n")
    assert gpus() == []
    add_tool(machine, 'echo "GPU-a, 00000000:1B:00.0"; echo "GPU-b, 00000000:2B:00.0"')
    assert gpus() == [Gpu("GPU-a", "0000:1b:00.0"), Gpu("GPU-b", "0000:2b:00.0")]


@pytest.mark.parametrize("script", ["echo no devices were found; exit 6", "exec /bin/sleep 60"])
def test_a_tool_that_fails_or_hangs_lists_none(machine: Path, monkeypatch: pytest.MonkeyPatch, script: str):
    monkeypatch.setattr(placement, "QUERY_SECONDS", 0.2)
    add_tool(machine, script)
    assert gpus() == []


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("1,0", [Gpu("1", "0000:1b:00.0"), Gpu("0", "0000:0b:00.0")]),
        ("GPU-1", [Gpu("GPU-1", "0000:1b:00.0")]),
        ("MIG-7, 5", [Gpu("MIG-7"), Gpu("5")]),
        ("0,-1,1", [Gpu("0", "0000:0b:00.0")]),
        ("", []),
    ],
)
def test_cuda_visible_devices_chooses_and_orders(machine: Path, visible: str, found: list[Gpu]):
    add_gpus(machine, ["0-3", "4-7"])
    assert gpus({"CUDA_VISIBLE_DEVICES": visible}) == found


def test_each_stage_gets_a_gpu_and_the_cores_near_it(machine: Path):
    add_gpus(machine, ["0-3", "0-3", "0-3", "4-7"])
    first, second = places(Config(pp_size=2), 2)
    assert first.stages == [
        {"CUDA_VISIBLE_DEVICES": "GPU-00,GPU-11", "TOKA_GPU": "0", "TOKA_CORES": "0,1,2,3"},
        {"CUDA_VISIBLE_DEVICES": "GPU-00,GPU-11", "TOKA_GPU": "1", "TOKA_CORES": "0,1,2,3"},
    ]
    assert first.manager == {"TOKA_CORES": "0,1,2,3"}
    assert {stage["CUDA_VISIBLE_DEVICES"] for stage in second.stages} == {"GPU-22,GPU-33"}
    assert second.manager == {"TOKA_CORES": "0,1,2,3,4,5,6,7"}, "near either of its GPUs"
    assert first.threads == second.threads == 0


def test_no_cores_are_chosen_where_none_is_far_or_nothing_is_told(machine: Path):
    add_gpus(machine, ["0-63", "64-127", "nonsense"])
    assert not near_cores("0000:0b:00.0") and not near_cores("0000:1b:00.0") and not near_cores("0000:2b:00.0")
    assert not near_cores("0000:9b:00.0") and not near_cores("")
    assert places(Config(), 1) == [Place({}, [{"CUDA_VISIBLE_DEVICES": "GPU-00", "TOKA_GPU": "0"}], 0)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp_size": 2, "pp_size": 2}, "dp_size=2 pp_size=2 tp_size=1 needs 4 GPUs, 3 are there"),
        ({"tp_size": 4, "device": "cuda"}, "dp_size=1 pp_size=1 tp_size=4 needs 4 GPUs, 3 are there"),
    ],
)
def test_too_few_gpus_are_refused_with_the_numbers(machine: Path, settings: dict[str, object], said: str):
    add_gpus(machine, ["", "", ""])
    config = Config(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{said}$"):
        places(config, config.dp_size)


def test_without_gpus_nothing_is_set_and_the_cores_are_divided(machine: Path):
    assert places(Config(), 1) == [Place({}, [{}], 0)], "one stage finds out for itself"
    assert places(Config(pp_size=2), 2) == [Place({}, [{}, {}], 2)] * 2
    assert places(Config(), 9)[8].threads == 1
    assert places(Config(threads=5), 2)[0].threads == 5
    with pytest.raises(ValueError, match="needs 1 GPUs, 0 are there"):
        places(Config(device="cuda"), 1)
    add_gpus(machine, ["0-3"])
    assert places(Config(device="cpu"), 2) == [Place({}, [{}], 4)] * 2


def test_lists_of_cores():
    assert parse_cores("0-3,8\n") == {0, 1, 2, 3, 8} and parse_cores("") == set()
    with pytest.raises(ValueError):
        parse_cores("0-x")


def test_a_process_keeps_to_its_cores():
    look = (
        "import os; from toka.placement import take_cores; core = min(os.sched_getaffinity(0));"
        "os.environ['TOKA_CORES'] = str(core); take_cores(); assert os.sched_getaffinity(0) == {core};"
        "assert 'TOKA_CORES' not in os.environ; take_cores(); assert os.sched_getaffinity(0) == {core}"
    )
    answer = subprocess.run([sys.executable, "-c", look], env=environment(), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
