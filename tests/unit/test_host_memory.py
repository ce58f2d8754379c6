"""Which limit counts, read from real files laid out as the kernel lays them out."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tiers.errors import HostMemoryError
from tiers.host_memory import (
    available_host_bytes,
    host_headroom,
    require_host_memory,
    shared_memory_has_huge_pages,
)

MIB = 2**20


class Machine:
    """A procfs and a cgroup tree in a directory."""

    def __init__(self, root: Path, available_mib: int, membership: str) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal: 999999999 kB\nMemAvailable:   {available_mib * 1024} kB\nHugePages_Total:       0\n"
        )
        (self.proc / "self" / "cgroup").write_text(membership)
        self.cgroups.mkdir()

    def group(self, path: str, files: dict[str, str]) -> None:
        directory = self.cgroups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)

    def available_mib(self) -> int:
        return available_host_bytes(self.proc, self.cgroups) // MIB


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 512, "0::/user\n")
    machine.group("user", {"memory.max": "max\n", "memory.current": "1\n"})
    assert host_headroom(machine.proc, machine.cgroups) == (512 * MIB, "MemAvailable of this machine")


def test_the_tightest_ancestor_of_a_version_2_group_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 4096, "0::/a/b\n")
    machine.group("a/b", {"memory.max": f"{2048 * MIB}\n", "memory.current": f"{100 * MIB}\n"})
    machine.group("a", {"memory.max": f"{1024 * MIB}\n", "memory.current": f"{200 * MIB}\n"})
    headroom = host_headroom(machine.proc, machine.cgroups)
    assert headroom.available_bytes == 824 * MIB
    assert headroom.limit.endswith("cgroup/a/memory.max")


def test_a_version_1_memory_group_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 4096, "4:cpu:/x\n3:memory,hugetlb:/job\n0::/\n")
    machine.group("memory/job", {"memory.limit_in_bytes": f"{300 * MIB}", "memory.usage_in_bytes": f"{50 * MIB}"})
    machine.group("memory", {"memory.limit_in_bytes": str(2**63 - 4096), "memory.usage_in_bytes": "5"})
    assert machine.available_mib() == 250


def test_a_container_that_names_its_hosts_group_uses_the_mounted_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 4096, "3:memory:/docker/0123abcd\n0::/../..\n")
    machine.group("memory", {"memory.limit_in_bytes": f"{100 * MIB}", "memory.usage_in_bytes": "0"})
    assert machine.available_mib() == 100


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 4096, "0::/a\n")
    stat = f"anon 1\nfile {60 * MIB}\ninactive_file {20 * MIB}\nactive_file {30 * MIB}\n"
    machine.group("a", {"memory.max": f"{100 * MIB}", "memory.current": f"{90 * MIB}", "memory.stat": stat})
    assert machine.available_mib() == 60


def test_a_machine_without_cgroups_works(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 64, "")
    (machine.proc / "self" / "cgroup").unlink()
    assert machine.available_mib() == 64


def test_the_refusal_says_needed_available_limit_and_remedy(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 4096, "0::/a\n")
    machine.group("a", {"memory.max": f"{1024 * MIB}", "memory.current": "0"})
    require_host_memory(900 * MIB, proc=machine.proc, cgroups=machine.cgroups)
    with pytest.raises(HostMemoryError) as caught:
        require_host_memory(2048 * MIB, proc=machine.proc, cgroups=machine.cgroups)
    message = str(caught.value)
    for part in ("needs 2.00 GiB", "1.00 GiB are available", "a/memory.max", "ram_gib", "nvme_dir"):
        assert part in message


def test_a_little_is_left_to_the_rest_of_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1024, "")
    with pytest.raises(HostMemoryError, match="reserved"):
        require_host_memory(1000 * MIB, proc=machine.proc, cgroups=machine.cgroups)


def test_this_machine_has_memory() -> None:
    assert available_host_bytes() > 0


def test_the_kernels_setting_says_whether_shared_memory_gets_huge_pages(tmp_path: Path) -> None:
    setting = tmp_path / "shmem_enabled"
    assert not shared_memory_has_huge_pages(setting)
    for selected, wanted in {
        "always": True,
        "advise": True,
        "within_size": True,
        "never": False,
        "deny": False,
    }.items():
        words = ["always", "within_size", "advise", "never", "deny", "force"]
        setting.write_text(" ".join(f"[{word}]" if word == selected else word for word in words) + "\n")
        assert shared_memory_has_huge_pages(setting) is wanted


def test_memory_that_an_ending_process_still_holds_is_waited_for(tmp_path: Path) -> None:
    machine, later = Machine(tmp_path / "now", 100, "0::/\n"), Machine(tmp_path / "later", 4000, "0::/\n")
    with pytest.raises(HostMemoryError, match="are available"):
        require_host_memory(500 * MIB, wait_s=0.05, proc=machine.proc, cgroups=machine.cgroups)
    freed = threading.Timer(0.2, (later.proc / "meminfo").replace, (machine.proc / "meminfo",))
    freed.start()
    require_host_memory(500 * MIB, wait_s=60.0, proc=machine.proc, cgroups=machine.cgroups)
    freed.join()
