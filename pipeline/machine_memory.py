"""What a run may take of a machine: this one, asked before anything is allocated, or one that a file describes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.errors import PipelineError
from pipeline.prediction.hardware import NO_GPU, Hardware
from pipeline.recipe import Recipe
from tiers.host_memory import available_host_bytes
from tiers.processors import usable_cores
from tiers.scratch import abandoned_bytes


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What a run may take of a machine."""

    cuda: bool
    host_bytes: int
    """min(MemAvailable, cgroup headroom), or a described machine's memory."""
    gpu_bytes: int
    """Free memory of the GPU; where there is none, all of the host's, for the CPU stands in."""
    nvme_bytes: int
    """Free bytes behind `[memory] nvme_dir`; 0 where the recipe names none."""
    cores: int
    """That the run's threads may use."""
    gpu_name: str | None = None
    """As its driver calls it; None where there is no GPU."""

    @classmethod
    def of_this_machine(cls, recipe: Recipe) -> MachineMemory:
        """Ask this machine.

        Raises:
            PipelineError: The recipe wants a GPU and none answers, or names a drive that cannot be used.
        """
        device = recipe.train.device
        cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        host_bytes = available_host_bytes()
        gpu_bytes, gpu_name = gpu_memory() if cuda else (host_bytes, None)
        nvme_bytes = _free_nvme_bytes(recipe.memory.nvme_dir)
        return cls(cuda, host_bytes, gpu_bytes, nvme_bytes, usable_cores(), gpu_name)

    @classmethod
    def of_hardware(cls, hardware: Hardware, recipe: Recipe) -> MachineMemory:
        """A described machine, whose drives count where the recipe names a directory for them.

        Raises:
            PipelineError: The recipe wants a GPU, and it has none.
        """
        has_gpu = hardware.device.name != NO_GPU
        if recipe.train.device == "cuda" and not has_gpu:
            raise PipelineError(
                f'train.device = "cuda": {hardware.name} has no GPU; describe another machine, or set '
                'train.device = "auto"'
            )
        cuda = has_gpu and recipe.train.device != "cpu"
        gpu_bytes = hardware.device.memory_bytes if cuda else hardware.host.memory_bytes
        drive = hardware.nvme if recipe.memory.nvme_dir is not None else None
        nvme_bytes = int(drive.capacity_gb * 1e9) if drive is not None else 0
        return cls(cuda, hardware.host.memory_bytes, gpu_bytes, nvme_bytes, hardware.host.cores)


def _free_nvme_bytes(nvme_dir: Path | None) -> int:
    if nvme_dir is None:
        return 0
    # A drive that is not mounted is no reason to train without it in silence.
    if not nvme_dir.is_dir():
        raise PipelineError(
            f"memory.nvme_dir = {nvme_dir} is no directory; make it on a local NVMe drive, or leave it out"
        )
    if not os.access(nvme_dir, os.W_OK | os.X_OK):
        raise PipelineError(
            f"memory.nvme_dir = {nvme_dir} is not writable for this user; change its owner, or give another"
        )
    # The run gets back what one that died left there.
    return shutil.disk_usage(nvme_dir).free + abandoned_bytes(nvme_dir)


def gpu_memory() -> tuple[int, str]:
    """Free memory and name of the first visible GPU, asked in a child process: a context would stay in this one.

    Raises:
        PipelineError: None answers.
    """
    question = "import torch; print(torch.cuda.mem_get_info()[0], torch.cuda.get_device_name())"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        reason = last.partition("Error: ")[2] or last
        raise PipelineError(f'train.device = "cuda": no GPU answers ({reason}); set train.device = "cpu"')
    free_bytes, _, name = answer.stdout.strip().partition(" ")
    return int(free_bytes), name
