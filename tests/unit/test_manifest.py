"""The manifest says what a checkpoint is; what it does not vouch for, or what it cannot read, is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import saved_facts, small_model, write_store
from tiers.direct_io import DirectIO
from tiers.errors import CheckpointError
from tiers.layout import Buffer, ElementType
from tiers.manifest import MANIFEST_NAME, Facts, Manifest, read_manifest, verify, write_manifest
from tiers.shards import FileRecord, ShardGeometry, shard_path

MODEL = small_model()


@pytest.fixture
def io() -> Iterator[DirectIO]:
    with DirectIO(requests=2) as opened:
        yield opened


@pytest.fixture
def checkpoint(tmp_path: Path, io: DirectIO) -> Path:
    files = write_store(tmp_path, MODEL, io, seed=0)
    write_manifest(tmp_path, Manifest(created=datetime.now(UTC), facts=saved_facts(MODEL, 10), files=files))
    return tmp_path


def change(directory: Path, **changes: Any) -> None:
    """Rewrite the manifest without the sum of itself, as earlier versions did."""
    path = directory / MANIFEST_NAME
    content: dict[str, Any] = json.loads(path.read_text()) | changes
    del content["crc32c"]
    path.write_text(json.dumps(content))


def test_a_manifest_is_read_as_it_was_written(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert manifest.facts == saved_facts(MODEL, 10)
    assert set(manifest.records()) == {
        str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()
    } - {MANIFEST_NAME}
    assert (checkpoint / MANIFEST_NAME).stat().st_mode & 0o777 == 0o600
    assert verify(checkpoint, deep=False) == verify(checkpoint, deep=True) == []


def test_any_flipped_byte_of_a_manifest_is_found_and_one_of_an_earlier_version_read(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST_NAME
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            read_manifest(checkpoint)
    path.write_bytes(whole)
    intact = read_manifest(checkpoint)
    change(checkpoint)
    assert read_manifest(checkpoint) == intact.model_copy(update={"crc32c": None})


def test_a_newer_format_is_refused_with_both_versions(checkpoint: Path) -> None:
    change(checkpoint, format_version=2, something_new=1)
    with pytest.raises(CheckpointError, match="has format version 2, this is version 1"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "", ".", "a//b", "a/./b"])
def test_a_path_that_leaves_the_directory_is_refused(checkpoint: Path, path: str) -> None:
    change(checkpoint, files=[{"path": path, "num_bytes": 1, "crc32c": 0}])
    with pytest.raises(CheckpointError, match="leaves the directory or is not in normal form"):
        read_manifest(checkpoint)


def test_a_file_that_stands_twice_is_refused(checkpoint: Path) -> None:
    change(checkpoint, files=[{"path": "a", "num_bytes": 1, "crc32c": 0}] * 2)
    with pytest.raises(CheckpointError, match="'a' stands twice"):
        read_manifest(checkpoint)


def test_a_link_out_of_the_directory_is_a_problem(checkpoint: Path) -> None:
    outside = checkpoint.parent / "outside.json"
    (checkpoint / "zarr.json").rename(outside)
    (checkpoint / "zarr.json").symlink_to(outside)
    assert verify(checkpoint, deep=False) == [f"{checkpoint}/zarr.json is not a file inside the checkpoint"]


@pytest.mark.parametrize(
    "changes", [{"extra": 1}, {"files": [{"path": "a", "num_bytes": "1", "crc32c": 0}]}, {"created": 3}, {"facts": {}}]
)
def test_unknown_keys_and_wrong_types_are_refused(checkpoint: Path, changes: dict[str, Any]) -> None:
    change(checkpoint, **changes)
    with pytest.raises(CheckpointError, match="is not a manifest of format version 1"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}"])
def test_a_torn_manifest_is_an_error(checkpoint: Path, content: str) -> None:
    (checkpoint / MANIFEST_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=f"cannot read {checkpoint}/{MANIFEST_NAME}"):
        read_manifest(checkpoint)


def test_facts_refuse_a_negative_step() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Facts(**(saved_facts(MODEL, 10).model_dump() | {"step": -1}))


def test_shallow_verification_finds_missing_and_truncated_files(checkpoint: Path) -> None:
    shard, metadata = checkpoint / shard_path(MODEL.layers[0], Buffer.EXP_AVG), checkpoint / "head" / "zarr.json"
    shard.write_bytes(shard.read_bytes()[:-1])
    metadata.unlink()
    truncated, missing = sorted(verify(checkpoint, deep=False))
    assert f"{shard} has" in truncated and "bytes, the manifest says" in truncated
    assert f"{metadata} cannot be read: No such file" in missing


def test_deep_verification_names_chunk_and_tensor_of_a_flipped_byte(checkpoint: Path) -> None:
    layer = MODEL.layers[1]
    shard = checkpoint / shard_path(layer, Buffer.EXP_AVG_SQ)
    content = bytearray(shard.read_bytes())
    content[100] ^= 4
    shard.write_bytes(content)
    assert verify(checkpoint, deep=False) == []
    (problem,) = verify(checkpoint, deep=True)
    assert f"chunk 0 of {shard} (tensors: {layer.tensors[0].name}, " in problem


def test_deep_verification_finds_a_damaged_index_and_metadata(checkpoint: Path) -> None:
    layer = MODEL.layers[1]
    shard, metadata = checkpoint / shard_path(layer, Buffer.WEIGHT), checkpoint / "zarr.json"
    content = bytearray(shard.read_bytes())
    content[ShardGeometry.of(layer.numel, ElementType.BFLOAT16).data_bytes] ^= 1
    shard.write_bytes(content)
    metadata.write_bytes(metadata.read_bytes().replace(b"bf16", b"fp32"))
    first, second = sorted(verify(checkpoint, deep=True))
    assert f"{shard}: the chunk index at its end is damaged" in first
    assert f"{metadata} has another crc32c" in second


def test_a_record_of_another_size_in_the_manifest_is_a_problem(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    files = (FileRecord("zarr.json", 1, 0), *(file for file in manifest.files if file.path != "zarr.json"))
    write_manifest(checkpoint, manifest.model_copy(update={"files": files}))
    (problem,) = verify(checkpoint, deep=False)
    assert "the manifest says 1" in problem
