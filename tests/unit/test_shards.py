"""The store's bytes: plain zarr and this project read each other's files, and damage never passes as data."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stores import (
    empty_arrays,
    layer_layout,
    random_arrays,
    same_bits,
    small_model,
    write_layer,
    write_store,
)
from tiers.checksum import crc32c
from tiers.direct_file import DirectMode
from tiers.direct_io import MAX_BLOCK_BYTES, DirectIO
from tiers.errors import ShardError
from tiers.layout import ELEMENTS_ALIGNMENT, PAGE_BYTES, Buffer, ElementType, LayerKind, ModelLayout, Precision
from tiers.shard_store import ShardStore
from tiers.shards import FileRecord, ShardGeometry, shard_path
from tiers.store_metadata import PROJECT_VERSION

LARGE = ModelLayout((layer_layout(0, "layer-0000", LayerKind.DECODER, 2051 * 32 - 4),), Precision.BF16, tied=False)
"""Its fp32 buffers are a few pages above 16 MiB: two chunks."""
PADDED = ModelLayout((layer_layout(0, "layer-0000", LayerKind.DECODER, 4097 * 32 - 4),), Precision.BF16, tied=False)
"""Its weights are a page above 16 MiB: two chunks and a page of padding."""


@pytest.fixture
def io() -> Iterator[DirectIO]:
    with DirectIO(requests=2) as opened:
        yield opened


def by_path(records: tuple[FileRecord, ...]) -> dict[str, FileRecord]:
    return {record.path: record for record in records}


@given(pages=st.integers(1, 3_000_000), element=st.sampled_from(ElementType))
def test_chunks_are_whole_pages_and_cover_the_buffer(pages: int, element: ElementType) -> None:
    numel = pages * ELEMENTS_ALIGNMENT
    geometry = ShardGeometry.of(numel, element)
    assert geometry.chunk_bytes % PAGE_BYTES == 0 and geometry.chunk_bytes <= MAX_BLOCK_BYTES
    assert 0 <= geometry.padding_bytes < min(geometry.chunk_bytes, geometry.num_chunks * PAGE_BYTES)


@pytest.mark.parametrize("precision", list(Precision))
def test_plain_zarr_reads_what_was_written(tmp_path: Path, io: DirectIO, precision: Precision) -> None:
    model = small_model(precision)
    write_store(tmp_path, model, io, seed=5)
    root = zarr.open_group(tmp_path, mode="r")
    assert root.attrs["format_version"] == 1 and root.attrs["layers"] == [layer.name for layer in model.layers]
    for layer in model.layers:
        for buffer, expected in random_arrays(model, layer, 5 + layer.index).items():
            array = root[f"{layer.name}/{buffer}"]
            assert isinstance(array, zarr.Array)
            assert np.array_equal(np.asarray(array[:]).view(np.uint8), expected.view(np.uint8))
            assert array.attrs["tensors"][0] == {  # type: ignore[index]
                "name": layer.tensors[0].name,
                "offset": 0,
                "shape": list(layer.tensors[0].shape),
            }


def test_plain_zarr_reads_several_chunks_and_their_padding(tmp_path: Path, io: DirectIO) -> None:
    (layer,) = PADDED.layers
    geometry = ShardGeometry.of(layer.numel, ElementType.BFLOAT16)
    assert (geometry.num_chunks, geometry.padding_bytes) == (2, PAGE_BYTES)
    arrays = {Buffer.WEIGHT: random_arrays(PADDED, layer, 1)[Buffer.WEIGHT]}
    store = ShardStore(tmp_path, PADDED, io, DirectMode.DIRECT)
    (record,) = [record for record in write_layer(store, layer, arrays) if record.chunk_bytes]
    array = zarr.open_array(tmp_path / layer.name / "weight", mode="r")
    assert np.array_equal(np.asarray(array[:]), arrays[Buffer.WEIGHT])
    content = (tmp_path / record.path).read_bytes()
    assert (len(content), crc32c(content)) == (record.num_bytes, record.crc32c)
    received = {Buffer.WEIGHT: empty_arrays(PADDED, layer)[Buffer.WEIGHT]}
    store.read(layer, received, by_path((record,)))
    assert same_bits(arrays, received)


def test_what_plain_zarr_wrote_is_read(tmp_path: Path, io: DirectIO) -> None:
    (layer,), arrays = LARGE.layers, random_arrays(LARGE, LARGE.layers[0], 2)
    store, received = ShardStore(tmp_path, LARGE, io, DirectMode.DIRECT), empty_arrays(LARGE, layer)
    records = by_path(write_layer(store, layer, arrays))
    for buffer, array in arrays.items():
        (tmp_path / shard_path(layer, buffer)).unlink()
        zarr.open_array(tmp_path / layer.name / buffer, mode="r+", config={"write_empty_chunks": True})[:] = array
    store.read(layer, received, records)
    assert same_bits(arrays, received)


def test_bfloat16_bits_survive_a_process_without_ml_dtypes(tmp_path: Path, io: DirectIO) -> None:
    model = small_model(rows=2100)
    layer = model.layers[1]
    arrays = random_arrays(model, layer, 0)
    arrays[Buffer.WEIGHT][: 1 << 16] = np.arange(1 << 16, dtype=np.uint16)  # every bfloat16, all NaN payloads
    write_layer(ShardStore(tmp_path, model, io, DirectMode.DIRECT), layer, arrays)
    program = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import numpy, zarr\n"
        f"array = zarr.open_array({str(tmp_path / layer.name / 'weight')!r}, mode='r')\n"
        "assert array.attrs['element_type'] == 'bfloat16' and array.dtype == 'uint16'\n"
        "assert numpy.array_equal(array[:65536], numpy.arange(65536, dtype='uint16'))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def stored(tmp_path: Path, io: DirectIO) -> tuple[ShardStore, dict[str, FileRecord]]:
    store = ShardStore(tmp_path, LARGE, io, DirectMode.DIRECT)
    return store, by_path(write_layer(store, LARGE.layers[0], random_arrays(LARGE, LARGE.layers[0], 3)))


def read_all(stored: tuple[ShardStore, dict[str, FileRecord]]) -> None:
    store, records = stored
    store.read(LARGE.layers[0], empty_arrays(LARGE, LARGE.layers[0]), records)


@pytest.mark.parametrize("buffer", [Buffer.WEIGHT_LOW, Buffer.EXP_AVG_SQ])
def test_a_flipped_byte_names_chunk_and_tensor(
    stored: tuple[ShardStore, dict[str, FileRecord]], buffer: Buffer
) -> None:
    path = stored[0].directory / shard_path(LARGE.layers[0], buffer)
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(
        ShardError, match=rf"chunk 0 of {path} \(tensors: model.layer-0000.matrix.*\) has another crc32c"
    ):
        read_all(stored)


@pytest.mark.parametrize("buffer", [Buffer.WEIGHT, Buffer.EXP_AVG, Buffer.EXP_AVG_SQ])
def test_an_absent_chunk_is_an_error_and_not_zeros(
    stored: tuple[ShardStore, dict[str, FileRecord]], buffer: Buffer
) -> None:
    path = stored[0].directory / shard_path(LARGE.layers[0], buffer)
    content = path.read_bytes()
    geometry = ShardGeometry.of(
        LARGE.layers[0].numel, ElementType.BFLOAT16 if buffer == "weight" else ElementType.FLOAT32
    )
    last = geometry.num_chunks - 1
    entries = content[geometry.data_bytes : geometry.data_bytes + 16 * last] + b"\xff" * 16
    path.write_bytes(content[: geometry.data_bytes] + entries + crc32c(entries).to_bytes(4, "little"))
    array = zarr.open_array(path.parent.parent, mode="r")
    assert not np.asarray(array[-ELEMENTS_ALIGNMENT:]).any()  # what a reader that trusts zarr would take
    with pytest.raises(ShardError, match=rf"chunk {last} of {path} \(tensors: .*\) was never written"):
        read_all(stored)


def test_a_missing_or_truncated_shard_or_index_is_an_error(stored: tuple[ShardStore, dict[str, FileRecord]]) -> None:
    path = stored[0].directory / shard_path(LARGE.layers[0], Buffer.EXP_AVG)
    content = path.read_bytes()
    path.write_bytes(content[:-10] + b"x" + content[-9:])
    with pytest.raises(ShardError, match=rf"{path}: the chunk index at its end is damaged"):
        read_all(stored)
    for num_bytes in (len(content) - 1, 4096, 0):
        os.truncate(path, num_bytes)
        with pytest.raises(ShardError, match=rf"{path} of layer-0000 has {num_bytes} bytes, its record says"):
            read_all(stored)
    path.unlink()
    with pytest.raises(ShardError, match=rf"{path} failed: \[ENOENT 2\]"):
        read_all(stored)


def test_a_store_of_another_model_or_precision_is_refused(tmp_path: Path, io: DirectIO) -> None:
    model = small_model()
    write_store(tmp_path, model, io, seed=0)
    other = ShardStore(tmp_path, small_model(rows=200), io, DirectMode.DIRECT)
    with pytest.raises(ShardError, match="of another model or precision: shape is"):
        other.check_layer(small_model(rows=200).layers[1], [Buffer.WEIGHT])
    with pytest.raises(ShardError, match="of another model or precision: data_type is"):
        ShardStore(tmp_path, small_model(Precision.FP32), io, DirectMode.DIRECT).check_layer(
            model.layers[1], [Buffer.WEIGHT]
        )


def _child_reads(directory: str) -> bool:
    model = small_model()
    layer = model.layers[1]
    with DirectIO(requests=2) as io:
        store, received = ShardStore(Path(directory), model, io, DirectMode.DIRECT), empty_arrays(model, layer)
        array = zarr.open_array(Path(directory) / layer.name / "exp_avg", mode="r")
        geometry = ShardGeometry.of(layer.numel, ElementType.FLOAT32)
        crcs = io.scan(
            Path(directory) / shard_path(layer, Buffer.EXP_AVG), DirectMode.DIRECT, geometry.data_bytes, 4096
        )
        store.check_layer(layer, received)
        return len(crcs) > 0 and np.asarray(array[:]).size == layer.numel


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_children_of_a_process_that_used_the_store_do_not_hang(tmp_path: Path, io: DirectIO, start_method: str) -> None:
    write_store(tmp_path, small_model(), io, seed=0)
    zarr.open_array(tmp_path / "layer-0000" / "exp_avg", mode="r")[:]  # zarr's event-loop thread runs now
    context = multiprocessing.get_context(start_method)
    with ProcessPoolExecutor(1, mp_context=context) as children:
        assert children.submit(_child_reads, str(tmp_path)).result(timeout=60)


_WRITER = """
import sys
from pathlib import Path
from tests.support.stores import small_model, random_arrays
from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
from tiers.shard_store import ShardStore
model = small_model(rows=2000)
layer = model.layers[1]
with DirectIO(2) as io:
    store = ShardStore(Path(sys.argv[1]), model, io, DirectMode.DIRECT)
    store.create_layer(layer, random_arrays(model, layer, 0))
    print("ready", flush=True)
    while True:
        for seed in range(4):
            store.write(layer, random_arrays(model, layer, seed), sync=False)
"""


def test_a_writer_killed_in_a_write_leaves_the_previous_version_usable(tmp_path: Path, io: DirectIO) -> None:
    model = small_model(rows=2000)
    layer = model.layers[1]
    good = ShardStore(tmp_path / "good", model, io, DirectMode.DIRECT)
    records = by_path(write_layer(good, layer, random_arrays(model, layer, 9)))
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path / "next")], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        writer.send_signal(signal.SIGKILL)
    received = empty_arrays(model, layer)
    torn = ShardStore(tmp_path / "next", model, io, DirectMode.DIRECT)
    with pytest.raises(ShardError, match="has another crc32c"):
        torn.read(layer, received, records)  # whatever it holds, it is not taken for the good version
    good.read(layer, received, records)
    assert same_bits(received, random_arrays(model, layer, 9))


def test_the_recorded_project_version_is_pyprojects() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text())["project"]["version"] == PROJECT_VERSION
