"""Figures of a machine that nobody has measured: good enough to choose between placements, not to promise a time.

`tasks.train` has no hardware file. What it chooses by predicted time depends on ratios (arithmetic to memory traffic to
the link), which hardly differ between machines with one kind of GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from pipeline.prediction.hardware import NO_GPU, SHIPPED, Device, Hardware, Host, Link, Nvme, load_hardware

UNKNOWN_GPU = "a100-pcie-512gb"
"""Shipped machine whose figures stand for a GPU that none has: neither the fastest nor the slowest of them."""

UNKNOWN_DRIVE = Nvme(capacity_gb=0.0, read_gbps=3.0, write_gbps=2.0, read_busy_gbps=1.5, write_busy_gbps=1.0)
"""One NVMe drive, sustained."""

CPU = Hardware(
    name="CPU",
    origin="assumed",
    device=Device(NO_GPU, 8.0, gemm_tflops=0.1, memory_gbps=20.0, product_tail=1e5, pass_s=1e-3),
    link=Link(to_device_gbps=10.0, to_host_gbps=10.0, both_ways_gbps=5.0),
    host=Host(4, 16.0, copy_gbps=20.0, update_gparams_per_s=1.0, update_busy_gparams_per_s=0.8),
    nvme=UNKNOWN_DRIVE,
)
"""A CPU that stands in for the device: a few cores, layers that are not compiled."""


def assumed_hardware(gpu_name: str | None, cores: int) -> Hardware:
    """Figures for a machine of which little is known.

    Args:
        gpu_name: As the driver tells it; None where there is no GPU.
        cores: Of the host.
    """
    if gpu_name is None:
        return CPU
    words = set(gpu_name.split()) - {"NVIDIA"}

    def likeness(machine: Hardware) -> tuple[int, int]:
        return len(words & set(machine.device.name.split())), -abs(machine.host.cores - cores)

    shipped = _shipped()
    likest = max(shipped.values(), key=likeness)
    if likeness(likest)[0] == 0:
        likest = shipped[UNKNOWN_GPU]
    return replace(likest, origin=f"assumed from {likest.name}", nvme=likest.nvme or UNKNOWN_DRIVE)


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Hardware]:
    return {path.stem: load_hardware(path) for path in sorted(SHIPPED.glob("*.toml"))}
