"""The arena with real processes and real files: sharing, shortage, residency, and nothing left behind."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiers.arena import Arena, ArenaHandle, populate
from tiers.arena_map import Extent
from tiers.errors import HostMemoryError, TierError
from tiers.layout import ElementType

PAGE = 4096
REPOSITORY = Path(__file__).parents[2]

OWNER = """
import sys
from tiers.arena import Arena
arena = Arena.create(64 * 4096, threads=1)
arena.bytes_view(0, 4)[:] = [1, 2, 3, 4]
print(arena.handle().path, flush=True)
sys.stdin.readline()
"""

WRITER = """
import sys
from tiers.arena import Arena, ArenaHandle
arena = Arena.attach(ArenaHandle(sys.argv[1], int(sys.argv[2])))
view = arena.bytes_view(0, 4)
assert view.tolist() == [9, 8, 7, 6], view
view[:] = [6, 7, 8, 9]
"""


def names_in(directory: str) -> set[str]:
    return {path.name for path in Path(directory).iterdir()}


def test_two_processes_see_each_others_writes() -> None:
    with Arena.create(4 * PAGE, threads=1) as arena:
        arena.bytes_view(0, 4)[:] = [9, 8, 7, 6]
        handle = arena.handle()
        command = [sys.executable, "-c", WRITER, handle.path, str(handle.num_bytes)]
        subprocess.run(command, check=True, cwd=REPOSITORY, timeout=60)
        assert arena.bytes_view(0, 4).tolist() == [6, 7, 8, 9]


def test_a_killed_owner_leaves_nothing() -> None:
    before = names_in("/dev/shm")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        handle = ArenaHandle(owner.stdout.readline().strip(), 64 * PAGE)
        attached = Arena.attach(handle)
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=60)
    # Who has attached may still finish what it does; nobody new gets in, and no file is left.
    assert attached.bytes_view(0, 4).tolist() == [1, 2, 3, 4]
    attached.close()
    with pytest.raises(TierError, match="owns it is gone"):
        Arena.attach(handle)
    assert names_in("/dev/shm") <= before


def test_populated_memory_is_resident_zero_and_reported() -> None:
    seen: list[tuple[int, int]] = []
    with Arena.create(1000 * PAGE, threads=2, progress=lambda done, total: seen.append((done, total))) as arena:
        assert Path(arena.handle().path).stat().st_blocks * 512 >= 1000 * PAGE
        assert not arena.bytes_view(0, arena.num_bytes).any()
    assert seen[-1] == (1000 * PAGE, 1000 * PAGE)


def test_a_kernel_without_populate_touches_every_page_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    descriptor = os.memfd_create("megatrain-arena")
    os.ftruncate(descriptor, 100 * PAGE)
    arena = Arena(descriptor, 100 * PAGE, owned=True)
    assert os.fstat(descriptor).st_blocks == 0
    unknown_advice = 9999
    with caplog.at_level(logging.WARNING), arena:
        populate(arena.bytes_view(0, arena.num_bytes), threads=2, advice=unknown_advice)
        assert os.fstat(descriptor).st_blocks * 512 >= 100 * PAGE
    assert "MADV_POPULATE_WRITE" in caplog.text


def test_a_request_beyond_the_machine_raises_before_anything_is_allocated() -> None:
    descriptors = names_in("/proc/self/fd")
    with pytest.raises(HostMemoryError, match=r"needs 1,024 TiB .* available .*nvme_dir"):
        Arena.create(2**50)
    assert names_in("/proc/self/fd") == descriptors


def test_a_request_beyond_the_recipe_names_the_knob() -> None:
    with pytest.raises(HostMemoryError, match=r"ram_gib allows 4.00 KiB; raise ram_gib"):
        Arena.create(2 * PAGE, limit_bytes=PAGE)


def test_closing_closes_every_descriptor_and_waits_for_views() -> None:
    descriptors = names_in("/proc/self/fd")
    arena = Arena.create(2 * PAGE, threads=1)
    attached = Arena.attach(arena.handle())
    view = attached.bytes_view(0, PAGE)
    handle = arena.handle()
    arena.bytes_view(0, 1)[0] = 7
    arena.close()
    arena.close()
    attached.close()
    assert view[0] == 7, "a view that is still held stays valid"
    del view
    assert names_in("/proc/self/fd") == descriptors
    with pytest.raises(TierError):
        Arena.attach(handle)


@pytest.mark.parametrize("element", list(ElementType))
def test_views_are_writable_and_typed_as_stored(element: ElementType) -> None:
    with Arena.create(2 * PAGE, threads=1) as arena:
        view = arena.view(Extent(PAGE, 64, element))
        assert view.dtype == np.dtype(element.storage) and view.shape == (64,)
        assert view.ctypes.data == arena.address + PAGE
        view[:] = 1
        assert not arena.bytes_view(0, PAGE).any()


def test_a_view_outside_the_arena_is_our_bug() -> None:
    with Arena.create(PAGE, threads=1) as arena, pytest.raises(AssertionError, match="outside the arena"):
        arena.view(Extent(0, PAGE, ElementType.INT16))


def test_attaching_to_something_else_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(PAGE)
        with pytest.raises(TierError, match=r"expected 4096 bytes of shared memory, found .*file"):
            Arena.attach(ArenaHandle(f"/proc/{os.getpid()}/fd/{file.fileno()}", PAGE))


def test_errors_and_handles_pickle() -> None:
    error = pickle.loads(pickle.dumps(HostMemoryError("too large")))
    assert isinstance(error, HostMemoryError) and str(error) == "too large"
    handle = ArenaHandle("/proc/1/fd/2", 3)
    assert pickle.loads(pickle.dumps(handle)) == handle


def test_odd_sizes_take_what_they_need_and_no_power_of_two() -> None:
    """FAULTS B73: slabs of 1.125 units, which an allocator of powers of two would round up to 2."""
    slab, slabs = 9 << 20, 8
    with Arena.create(slab * slabs, threads=1) as arena:
        descriptor = os.open(arena.handle().path, os.O_RDONLY)
        resident_bytes = os.fstat(descriptor).st_blocks * 512
        os.close(descriptor)
    assert slab * slabs <= resident_bytes <= 1.05 * slab * slabs
