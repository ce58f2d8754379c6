"""Whether the GPU that a Ray head hands out has the memory that the plan found on the first visible one.

An embedded Ray has one GPU to hand out, and that is the first visible. A head may have several: it hands out the first
that no other job holds, whichever the driver sees as its first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import ray

from cluster.errors import ClusterRefusedError
from pipeline.crew import START_TIMEOUT_S
from pipeline.machine_memory import gpu_memory
from tiers.quantities import shown_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"


def require_planned_gpu(needed_bytes: int, memory: Callable[[], tuple[int, str]] = gpu_memory) -> str | None:
    """Ask Ray for a GPU, as the compute actor will, and hold the plan against it.

    Args:
        needed_bytes: Device memory that the plan takes.
        memory: Asked in a process that Ray gave a GPU: its free bytes and name.

    Returns:
        What is worth knowing where the GPU is another one with room enough; None where it is the same.

    Raises:
        ClusterRefusedError: It has less free memory than the plan takes.
        RayError: It cannot be asked.
    """
    planned = _first_visible(os.environ)
    ask: Any = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_ask)
    given, free_bytes, name = ray.get(ask.remote(planned, memory), timeout=START_TIMEOUT_S)
    if given == planned:
        return None
    other = f"Ray hands out GPU {given} ({name}, {shown_bytes(free_bytes)} free), the plan was made for GPU {planned}"
    if free_bytes < needed_bytes:
        raise ClusterRefusedError(
            f"{other} and takes {shown_bytes(needed_bytes)} of it; end what holds GPU {planned}, or set "
            f"{VISIBLE}={given} for this command, so that the plan is made for that one"
        )
    return f"{other}; {shown_bytes(needed_bytes)} are enough"


def _first_visible(environment: Mapping[str, str]) -> str:
    """The name of the GPU that a process finds first: a number, or a UUID."""
    return environment.get(VISIBLE, "0").split(",")[0].strip()


def _ask(planned: str, memory: Callable[[], tuple[int, str]]) -> tuple[str, int, str]:
    """In a process of Ray's: the GPU it was given, and unless it is the `planned` one free bytes and name of it."""
    given = _first_visible(os.environ)
    return (given, 0, "") if given == planned else (given, *memory())
