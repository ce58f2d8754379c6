"""The prefetcher: the same bits whatever the placement, slots and files that never lie, one run a directory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import zarr
from safetensors.numpy import save_file

from tests.support.stores import saved_facts, small_model
from tiers import checkpoint
from tiers.arena_map import LayerHome, TierPlan
from tiers.checkpoint import newest_complete
from tiers.errors import CheckpointError, ShardError, TierError
from tiers.initialise import MOST_THREADS
from tiers.layout import Buffer, ElementType, ModelLayout, Precision, state_buffers, stored_buffers
from tiers.manifest import read_manifest, verify
from tiers.parameter_tier import ParameterTier, ParameterTierActor
from tiers.prefetcher import Prefetcher, PrefetcherActor
from tiers.scratch import LOCK_NAME, SCRATCH_NAME, scratch_bytes
from tiers.shards import FileRecord, shard_path
from tiers.store_metadata import Compression

MODEL = small_model()
PLACEMENTS: dict[str, tuple[LayerHome, ...]] = {
    "ram": tuple(LayerHome(gradient_slot=index) for index in range(4)),
    "state on nvme": (LayerHome(), LayerHome(None, 0, 1), LayerHome(None, 0, 1), LayerHome(None, 1, 2)),
    "all on nvme": (LayerHome(1, 1), LayerHome(0, 0), LayerHome(0, 0), LayerHome(1, 1)),
}
"""Layers that share a slot are of one size in `state on nvme`, and of several with what lies in RAM beside."""

Start = Callable[..., "Running"]


class Running:
    """A tier and a prefetcher in this process."""

    def __init__(
        self,
        stack: ExitStack,
        placement: str,
        nvme_dir: Path,
        model: ModelLayout,
        compression: Compression,
        threads: int,
    ) -> None:
        plan = TierPlan(model, PLACEMENTS[placement][: len(model.layers)], ElementType.BFLOAT16)
        tier = ParameterTier(plan, threads=1)
        stack.callback(tier.close)
        self.arena, self.map = tier.handle().attach()
        stack.callback(self.arena.close)
        self.plan = plan
        self.prefetcher = Prefetcher(tier.handle(), nvme_dir=nvme_dir, threads=threads, compression=compression)
        stack.callback(self.prefetcher.close)

    def layers(self) -> range:
        return range(len(self.plan.model.layers))

    def state(self, layer: int) -> dict[Buffer, bytes]:
        return {buffer: self.arena.view(extent).tobytes() for buffer, extent in self.map.states[layer].items()}

    def snapshot(self, directory: Path) -> dict[str, FileRecord]:
        directory.mkdir(exist_ok=True)
        return {record.path: record for layer in self.layers() for record in self.prefetcher.snapshot(layer, directory)}

    def save(self, run_dir: Path, step: int = 1) -> Path:
        writer = checkpoint.begin(run_dir, step, self.plan.model)
        return writer.publish(self.snapshot(writer.directory).values(), saved_facts(self.plan.model, step))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(
            placement: str,
            model: ModelLayout = MODEL,
            nvme_dir: Path = tmp_path,
            compression: Compression = Compression.NONE,
            threads: int = 2,
        ) -> Running:
            return Running(stack, placement, nvme_dir, model, compression, threads)

        yield begin


def initialise(running: Running, seed: int = 3) -> Running:
    for layer in running.layers():
        running.prefetcher.initialise(layer, seed)
    return running


@pytest.mark.parametrize("precision", list(Precision))
def test_first_values_and_their_checkpoint_do_not_depend_on_the_placement(
    tmp_path: Path, start: Start, precision: Precision
) -> None:
    model, records = small_model(precision), []
    for placement in PLACEMENTS:
        running = initialise(start(placement, model))
        records.append(running.snapshot(tmp_path / placement))
        running.prefetcher.close()
    assert records[0] == records[1] == records[2]
    assert len({record.crc32c for record in records[0].values()}) > 8


@pytest.mark.parametrize("source", PLACEMENTS)
@pytest.mark.parametrize("target", PLACEMENTS)
def test_a_checkpoint_is_restored_into_any_placement(tmp_path: Path, start: Start, source: str, target: str) -> None:
    first = initialise(start(source))
    saved = first.save(tmp_path)
    first.prefetcher.close()
    second = start(target)
    for layer in second.layers():
        second.prefetcher.restore(layer, saved)
    again = second.snapshot(tmp_path / "again")
    assert verify(saved, deep=True) == []
    assert again == {path: record for path, record in read_manifest(saved).records().items() if path != "zarr.json"}


def test_first_values_are_drawn_by_few_threads_whatever_the_number_of_disk_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, at_once, asked = threading.Event(), list[bool](), list[int]()

    def draw(arena: object, arena_map: object, layer: object, seed: int, threads: int) -> None:
        at_once.append(drawing.is_set())
        asked.append(threads)
        drawing.set()
        drawn.wait(0.1)
        drawing.clear()

    drawn = threading.Event()
    running = start("ram", threads=256)
    monkeypatch.setattr("tiers.prefetcher.initialise_layer", draw)
    callers = [threading.Thread(target=running.prefetcher.initialise, args=(layer, 0)) for layer in (1, 2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert at_once == [False, False] and max(asked) <= MOST_THREADS


@pytest.mark.parametrize("placement", ["state on nvme", "all on nvme"])
def test_layers_that_share_a_slot_come_back_as_they_were_stored(start: Start, placement: str) -> None:
    running, rng, expected = start(placement), np.random.default_rng(0), {}
    layers = [layer for layer in running.layers() if running.plan.homes[layer].state_slot is not None]
    for layer in layers:
        for extent in running.map.states[layer].values():
            memory = running.arena.view(extent).view(np.uint8)
            memory[:] = rng.integers(0, 256, memory.size, dtype=np.uint8)
        running.prefetcher.store_state(layer)
        expected[layer] = running.state(layer)
    for layer in reversed(layers):
        running.prefetcher.load_state(layer)
        assert running.state(layer) == expected[layer]
        if running.plan.homes[layer].weight_slot is not None:
            running.prefetcher.load_weights(layer)
            assert running.arena.view(running.map.weights[layer]).tobytes() == expected[layer][Buffer.WEIGHT]
        running.prefetcher.release_state(layer)


def test_calls_out_of_order_are_refused_before_they_lose_an_update(start: Start) -> None:
    prefetcher = initialise(start("all on nvme")).prefetcher
    prefetcher.load_state(1)
    for attempt in (prefetcher.load_state, prefetcher.store_state, lambda layer: prefetcher.initialise(layer, 3)):
        with pytest.raises(TierError, match=r"the state of layer 2, .* slot 0 still holds layer 1, which is resident"):
            attempt(2)
    with pytest.raises(TierError, match="cannot begin_load the state of layer 1, which is resident"):
        prefetcher.load_state(1)
    prefetcher.store_state(1)
    with pytest.raises(TierError, match="cannot evict the state of layer 1, which is on_disk"):
        prefetcher.release_state(1)
    for layer in (1, 2, 2):
        prefetcher.load_weights(layer)
    prefetcher.load_state(2)
    prefetcher.store_state(2)


def test_a_failed_store_keeps_its_slot_and_stale_weights_are_not_loaded(tmp_path: Path, start: Start) -> None:
    prefetcher = initialise(start("all on nvme")).prefetcher
    path = tmp_path / SCRATCH_NAME / shard_path(MODEL.layers[1], Buffer.EXP_AVG)
    prefetcher.load_state(1)
    aside = path.rename(path.with_name("aside"))
    with pytest.raises(ShardError, match="the file is missing"):
        prefetcher.store_state(1)
    with pytest.raises(TierError, match="slot 0 still holds layer 1, which is dirty"):
        prefetcher.load_state(2)
    with pytest.raises(TierError, match="its shard is out of date, for its state is dirty"):
        prefetcher.load_weights(1)
    aside.rename(path)
    prefetcher.store_state(1)
    prefetcher.load_weights(1)


def test_files_of_state_beside_weights_in_ram_do_not_hold_the_weights(tmp_path: Path, start: Start) -> None:
    running = initialise(start("state on nvme"))
    scratch = tmp_path / SCRATCH_NAME
    assert {path.name for path in (scratch / "layer-0000").iterdir() if path.is_dir()} == set(
        state_buffers(Precision.BF16)
    )
    assert not (scratch / "embedding").exists()
    array = zarr.open_array(scratch / "layer-0000" / "exp_avg_sq", mode="r")
    assert not np.asarray(array[:]).any()
    assert sum(path.stat().st_size for path in scratch.rglob("0")) == scratch_bytes(running.plan)


def test_imported_values_do_not_depend_on_the_placement(tmp_path: Path, start: Start) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        tensor.name: rng.standard_normal(tensor.shape, np.float32) for layer in MODEL.layers for tensor in layer.tensors
    }
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    records = []
    for placement in PLACEMENTS:
        running = start(placement)
        for layer in running.layers():
            running.prefetcher.import_safetensors(layer, tmp_path / "hf")
        records.append(running.snapshot(tmp_path / placement))
        running.prefetcher.close()
    assert records[0] == records[1] == records[2]


def test_a_layer_that_was_never_stored_is_not_loaded(start: Start) -> None:
    running = start("all on nvme")
    with pytest.raises(ShardError, match=r"layer-0000/weight/c/0 has no record: it was never stored"):
        running.prefetcher.load_weights(1)


def test_damage_of_a_working_file_shows_when_it_is_loaded_or_snapshotted(tmp_path: Path, start: Start) -> None:
    running = initialise(start("state on nvme"))
    path = tmp_path / SCRATCH_NAME / shard_path(MODEL.layers[2], Buffer.EXP_AVG)
    with path.open("r+b") as file:
        file.seek(4100)
        file.write(b"\x01")
    (tmp_path / "snapshot").mkdir()
    for attempt in (
        running.prefetcher.load_state,
        lambda layer: running.prefetcher.snapshot(layer, tmp_path / "snapshot"),
    ):
        with pytest.raises(ShardError, match=rf"chunk 0 of {path} \(tensors: .*another crc32c"):
            attempt(2)
    os.truncate(path, 4096)
    with pytest.raises(ShardError, match=rf"{path} of layer-0001 has 4096 bytes"):
        running.prefetcher.load_state(2)


def test_a_damaged_checkpoint_is_not_restored(tmp_path: Path, start: Start) -> None:
    running = initialise(start("ram"))
    saved = running.save(tmp_path)
    path = saved / shard_path(MODEL.layers[0], Buffer.WEIGHT_LOW)
    with path.open("r+b") as file:
        file.write(b"\xff\x00\xff")
    with pytest.raises(ShardError, match=rf"chunk 0 of {path} \(tensors: model.embedding.matrix.*another crc32c"):
        running.prefetcher.restore(0, saved)
    running.prefetcher.restore(1, saved)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_compressed_checkpoint_holds_the_same_values_for_us_and_for_plain_zarr(
    tmp_path: Path, start: Start, placement: str
) -> None:
    plain = initialise(start(placement))
    wanted = plain.save(tmp_path / "plain")
    plain.prefetcher.close()
    compressing = start(placement, compression=Compression.ZSTD)
    for layer in compressing.layers():
        compressing.prefetcher.restore(layer, wanted)
    saved = compressing.save(tmp_path / "compressed")
    compressing.prefetcher.close()
    assert verify(saved, deep=True) == []
    sizes = [sum(record.num_bytes for record in read_manifest(path).files) for path in (saved, wanted)]
    assert sizes[0] < 0.7 * sizes[1]
    for layer in MODEL.layers:
        for buffer in stored_buffers(MODEL.precision):
            arrays = [zarr.open_array(path / layer.name / buffer, mode="r")[:] for path in (saved, wanted)]
            np.testing.assert_array_equal(*arrays)
    again = start(placement)
    for index in again.layers():
        again.prefetcher.restore(index, saved)
    assert again.snapshot(tmp_path / "again") == {
        path: record for path, record in read_manifest(wanted).records().items() if path != "zarr.json"
    }


def test_damage_of_a_compressed_shard_is_found_and_not_restored(tmp_path: Path, start: Start) -> None:
    running = initialise(start("ram", compression=Compression.ZSTD))
    saved = running.save(tmp_path)
    path = saved / shard_path(MODEL.layers[0], Buffer.WEIGHT_LOW)
    whole = path.read_bytes()
    for place in (20, len(whole) - 10):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ShardError, match=r"another crc32c|chunk index"):
            running.prefetcher.restore(0, saved)
        assert len(verify(saved, deep=True)) == 1
    path.write_bytes(whole[:-100])
    with pytest.raises(ShardError):
        running.prefetcher.restore(0, saved)
    running.prefetcher.restore(1, saved)


def test_a_checkpoint_of_another_precision_or_model_is_not_restored(tmp_path: Path, start: Start) -> None:
    saved = initialise(start("ram")).save(tmp_path)
    with pytest.raises(CheckpointError, match="was trained in bf16, this run in fp32"):
        start("ram", small_model(Precision.FP32)).prefetcher.restore(0, saved)
    with pytest.raises(ShardError, match="of another model or precision: shape is"):
        start("ram", small_model(rows=200)).prefetcher.restore(0, saved)
    with pytest.raises(CheckpointError, match="has no manifest"):
        start("ram").prefetcher.restore(0, tmp_path)


def test_three_runs_leave_no_file_and_use_the_same_names(tmp_path: Path, start: Start) -> None:
    (tmp_path / "of the user").write_text("mine")
    listings = []
    for _ in range(3):
        running = initialise(start("all on nvme"))
        listings.append(sorted(str(path) for path in tmp_path.rglob("*")))
        running.prefetcher.close()
        assert {path.name for path in tmp_path.iterdir()} == {"of the user", LOCK_NAME}
    assert listings[0] == listings[1] == listings[2]


def test_two_runs_may_not_share_a_directory(start: Start) -> None:
    start("all on nvme")
    with pytest.raises(ShardError, match=rf"is in use by the run of process {os.getpid()}"):
        start("all on nvme")


def test_scratch_of_a_killed_run_is_removed_by_the_next(tmp_path: Path, start: Start) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        running = initialise(start("all on nvme"))
        (tmp_path / SCRATCH_NAME / "stale").write_text("left")
        os.write(writer, str(running.map.total_bytes).encode())
        signal.pause()
    assert os.read(reader, 32)
    with pytest.raises(ShardError, match=f"process {child}"):
        start("all on nvme")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for descriptor in (reader, writer):
        os.close(descriptor)
    initialise(start("all on nvme"))
    assert not (tmp_path / SCRATCH_NAME / "stale").exists()


def test_a_missing_or_full_nvme_directory_is_told_before_training(tmp_path: Path, start: Start) -> None:
    with pytest.raises(ShardError, match="none"):
        start("all on nvme", nvme_dir=tmp_path / "none")
    plan = TierPlan(MODEL, PLACEMENTS["all on nvme"], ElementType.BFLOAT16)
    tier = ParameterTier(plan, threads=1)
    with pytest.raises(TierError, match=rf"keeps {scratch_bytes(plan):,} bytes on NVMe; set memory.nvme_dir"):
        Prefetcher(tier.handle(), nvme_dir=None, threads=1)
    tier.close()
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], check=False).returncode:
        pytest.skip("may not mount")
    try:
        with pytest.raises(ShardError, match=rf"needs {scratch_bytes(plan):,} bytes and has"):
            start("all on nvme", nvme_dir=place)
        assert [path.name for path in place.iterdir()] == [LOCK_NAME]
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("placement", ["ram", "state on nvme"])
def test_restoring_takes_less_memory_than_one_layer_beside_the_arena(
    tmp_path: Path, start: Start, placement: str
) -> None:
    model = small_model(rows=10_000)
    first = initialise(start(placement, model))
    saved = first.save(tmp_path)
    first.prefetcher.close()
    second = start(placement, model)
    for layer in second.layers():
        second.prefetcher.restore(layer, saved)  # threads start, each with a stack of its own, and modules load
    layer_bytes = sum(extent.num_bytes for extent in second.map.states[1].values())
    data_bytes = _private_bytes()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + layer_bytes, limits[1]))
    try:
        for layer in second.layers():
            second.prefetcher.restore(layer, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert second.map.total_bytes > 2 * layer_bytes


def _private_bytes() -> int:
    return int(psutil.Process().memory_info().data)


def test_operations_leave_spans_with_their_bytes(tmp_path: Path, start: Start) -> None:
    running = initialise(start("all on nvme"))
    running.prefetcher.take_spans()
    running.prefetcher.load_weights(1)
    running.prefetcher.load_state(1)
    running.prefetcher.store_state(1)
    running.snapshot(tmp_path / "snapshot")
    spans = running.prefetcher.take_spans()
    numel = MODEL.layers[1].numel
    assert [(span.name, span.lane, span.num_bytes) for span in spans[:3]] == [
        ("load_weights[1]", "nvme_read", 2 * numel),
        ("load_state[1]", "nvme_read", 12 * numel),
        ("store_state[1]", "nvme_write", 12 * numel),
    ]
    assert all(0 < span.start_s <= span.end_s for span in spans)
    assert running.prefetcher.take_spans() == ()


@pytest.mark.ray
def test_the_actor_takes_refs_to_wait_for_and_its_checkpoint_is_published(ray_local: None, tmp_path: Path) -> None:
    plan = TierPlan(MODEL, PLACEMENTS["all on nvme"], ElementType.BFLOAT16)
    tier = ParameterTierActor.remote(plan, threads=1)
    handle = ray.get(tier.handle.remote())
    prefetcher = PrefetcherActor.remote(handle, nvme_dir=tmp_path, threads=2)
    layers = range(len(MODEL.layers))
    filled = [prefetcher.initialise.remote(layer, 3) for layer in layers]
    writer = checkpoint.begin(tmp_path, 1, MODEL)
    records = ray.get([prefetcher.snapshot.remote(layer, writer.directory, *filled) for layer in layers])
    saved = writer.publish([record for layer in records for record in layer], saved_facts(MODEL, 1))
    assert newest_complete(tmp_path) == (saved, ()) and verify(saved, deep=True) == []
    ray.get([prefetcher.restore.remote(layer, saved) for layer in layers])
    assert len(ray.get(prefetcher.take_spans.remote())) == len(layers) * 5
    os.truncate(tmp_path / SCRATCH_NAME / shard_path(MODEL.layers[1], Buffer.WEIGHT), 4096)
    with pytest.raises(ShardError, match="layer-0000 has 4096 bytes"):
        ray.get(prefetcher.load_weights.remote(1))
    ray.get(prefetcher.close.remote())
    assert not (tmp_path / SCRATCH_NAME).exists()
    for actor in (prefetcher, tier):
        ray.kill(actor)
