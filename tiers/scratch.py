"""The directory of a run's NVMe files: one run at a time, stable names, cleaned at its end and after a dead one."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from pathlib import Path

from tiers.arena_map import TierPlan
from tiers.durable_files import FILE_MODE, make_directory, naming
from tiers.errors import ShardError
from tiers.layout import Buffer, buffer_types, state_buffers, stored_buffers
from tiers.shards import ShardGeometry

SCRATCH_NAME = "megatrain-scratch"
"""Everything of ours under the user's NVMe directory, which may hold other things, is under this name."""
LOCK_NAME = "megatrain-scratch.lock"

_BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the filesystem."""

logger = logging.getLogger(__name__)


def nvme_buffers(plan: TierPlan, layer: int) -> tuple[Buffer, ...]:
    """Buffers of a layer that live on NVMe between uses."""
    home, precision = plan.homes[layer], plan.model.precision
    if home.state_slot is None:
        return ()
    return state_buffers(precision) if home.weight_slot is None else stored_buffers(precision)


def scratch_bytes(plan: TierPlan) -> int:
    """Disk space of all NVMe working files of a run."""
    types = buffer_types(plan.model.precision)
    return sum(
        ShardGeometry.of(layer.numel, types[buffer]).file_bytes
        for layer in plan.model.layers
        for buffer in nvme_buffers(plan, layer.index)
    )


def abandoned_bytes(nvme_dir: Path) -> int:
    """Disk space that the scratch of a run that died takes: the next one gets it back before it writes."""
    try:
        lock = os.open(nvme_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held; or there are no locks here, and no run will be let in
        return 0
    finally:
        os.close(lock)
    return bytes_on_disk(nvme_dir / SCRATCH_NAME)


def bytes_on_disk(path: Path) -> int:
    """Disk space of a file, or of a directory with all that is in it; what vanishes meanwhile takes none."""
    num_bytes = 0
    for each in (path, *(() if path.is_symlink() else path.rglob("*"))):
        with contextlib.suppress(FileNotFoundError):
            num_bytes += each.lstat().st_blocks * _BLOCK_BYTES
    return num_bytes


class Scratch:
    """Holds `nvme_dir` for this run, from construction to `close` or the death of the process.

    Its content is of this run only: checkpoints are what outlives a run.
    """

    def __init__(self, nvme_dir: Path) -> None:
        """Take the lock and remove what a dead run left.

        Raises:
            ShardError: The directory is missing, not writable, full or without file locks, or another run holds it.
                Nothing is left of this one then.
        """
        self.path, lock_path = nvme_dir / SCRATCH_NAME, nvme_dir / LOCK_NAME
        self._lock: int | None = None
        try:
            self._lock = os.open(lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
            with naming(lock_path):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert self._lock is not None
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self._release()
            raise ShardError(
                f"the NVMe directory {nvme_dir} is in use by the run of process {holder}; "
                "end that run, or give this one another memory.nvme_dir"
            ) from None
        except OSError as error:
            self._release()
            raise ShardError(
                f"cannot lock the NVMe directory {nvme_dir}: {error}; create it or name another"
            ) from error
        try:
            if self.path.exists():
                logger.info("removing the scratch of a run that died: %s", self.path)
                shutil.rmtree(self.path)
            with naming(lock_path):
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, str(os.getpid()).encode(), 0)
            make_directory(self.path)
        except OSError as error:
            self.close()
            raise ShardError(f"cannot prepare {self.path}: {error}") from error

    def close(self) -> None:
        """Remove the scratch and let the next run have the directory. May be called twice.

        The lock file stays: removing it would let two runs lock different files of the same name.
        """
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
