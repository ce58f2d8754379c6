"""Prepare the device of this process: choose it, set its arithmetic, register the arena's memory with it."""

from __future__ import annotations

import os
import resource

import torch

from pipeline.compute.settings import ComputeSettings
from pipeline.errors import PipelineError
from pipeline.memory.host_footprint import COMPILER_WORKERS
from tiers.quantities import shown_bytes


def open_device(settings: ComputeSettings) -> torch.device:
    """Choose the device and make torch compute on it as the settings say. Changes the state of the whole process.

    Raises:
        PipelineError: CUDA is asked for and not exactly one GPU is visible.
    """
    torch.set_num_threads(settings.threads)
    # fp32 means fp32: TF32 keeps 10 bits of the mantissa.
    torch.set_float32_matmul_precision("highest")
    on_cpu = settings.device == "cpu"
    if settings.deterministic:
        # cuBLAS reads it when it starts; torch refuses deterministic products without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(settings.deterministic or on_cpu)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if on_cpu:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count != 1:
        raise PipelineError(
            f"device cuda needs exactly one visible GPU, found {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); "
            "start the compute actor with num_gpus=1, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    # Split-K sums of weight gradients run over all tokens of a micro-batch: in bf16 they would lose the small ones.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if settings.compile:
        from torch._inductor import config

        config.compile_threads = COMPILER_WORKERS
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def release_pinned_copies() -> None:
    """Give back the pinned memory in which Inductor held what it timed kernels on; torch would keep it for the run."""
    # Torch 2.11 has only the second.
    release = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
    release()


def register_host_memory(address: int, num_bytes: int) -> None:
    """Pin memory of this process for the device, so that copies run at full speed beside everything else.

    Torch's own pinned allocator would round up to powers of two; this registers exactly what the arena has.

    Args:
        address: Page-aligned start.
        num_bytes: Length.

    Raises:
        PipelineError: The driver refused.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    if status:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else shown_bytes(soft)
        raise PipelineError(
            f"cannot register {shown_bytes(num_bytes)} of the arena with the GPU: CUDA error {status}; the limit of "
            f"locked memory (ulimit -l) is {limit}; raise it to {num_bytes // 1024} KiB or more, or keep fewer layers "
            "in RAM ([memory] ram_gib); under WSL2 raise `memory` in .wslconfig"
        )


def unregister_host_memory(address: int) -> None:
    """Undo `register_host_memory`; the memory may be unmapped afterwards."""
    torch.cuda.cudart().cudaHostUnregister(address)
