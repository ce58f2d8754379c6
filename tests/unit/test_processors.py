"""Processors that a process may use, not those that the machine has."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.machine_memory import MachineMemory
from pipeline.prediction.hardware import SHIPPED
from pipeline.recipe import load_recipe
from tiers.processors import usable_cores

REPOSITORY = Path(__file__).resolve().parents[2]
ALL = len(os.sched_getaffinity(0))


def cores_under(root: Path, membership: str, files: dict[str, str]) -> int:
    """With a procfs and a tree of control groups laid out as the kernel does."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        file = cgroups / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return usable_cores(proc, cgroups)


def test_an_affinity_counts_wherever_a_run_asks_for_cores() -> None:
    """As of `taskset`, a batch system or a container's cpuset; that of a thread, so that only this test has it."""
    recipe = load_recipe(SHIPPED.parent / "plan" / "qwen2.5-7b.toml", ('train.device="cpu"', "memory.nvme_dir="))

    def on_one() -> tuple[int, int]:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return usable_cores(), MachineMemory.of_this_machine(recipe).cores

    with ThreadPoolExecutor(1) as alone:
        assert alone.submit(on_one).result() == (1, 1)
    assert usable_cores() <= ALL


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("max 100000", ALL), ("150000 100000", min(2, ALL)), ("20 100", 1)]
)
def test_a_quota_of_a_version_2_group_counts_rounded_up(tmp_path: Path, quota: str, cores: int) -> None:
    assert cores_under(tmp_path, "0::/a/b\n", {"a/b/cpu.max": f"{quota}\n"}) == cores


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "900000 100000\n", "a/cpu.max": "50000 100000\n"}
    assert cores_under(tmp_path, "0::/a/b\n", files) == 1


@pytest.mark.parametrize(("quota", "cores"), [("100000", 1), ("-1", ALL)])
def test_a_quota_of_a_version_1_group_counts(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"cpu/job/cpu.cfs_quota_us": f"{quota}\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
    assert cores_under(tmp_path, "5:cpuset:/\n4:cpu,cpuacct:/job\n0::/\n", files) == cores


def test_a_container_that_names_its_hosts_group_uses_the_mounted_root(tmp_path: Path) -> None:
    assert cores_under(tmp_path, "0::/../..\n", {"cpu.max": "100000 100000\n"}) == 1


def test_without_control_groups_all_that_the_affinity_has_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path) == ALL


def test_cores_are_counted_in_one_place() -> None:
    counting = re.compile(r"cpu_count|sched_getaffinity")
    files = [path for folder in ("tiers", "pipeline", "tasks") for path in (REPOSITORY / folder).rglob("*.py")]
    assert [path.name for path in files if counting.search(path.read_text())] == ["processors.py"]
