"""The manifest of a checkpoint: what it is and every file with its size and crc32c. Its presence means complete.

The manifest decides, never zarr: a chunk that zarr finds absent reads as zeros in silence.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tiers.checksum import crc32c, joined_crc32c
from tiers.compressed_store import read_stored
from tiers.direct_file import DirectMode
from tiers.direct_io import DirectIO
from tiers.durable_files import naming, replace_file
from tiers.errors import CheckpointError, ShardError
from tiers.layout import Precision
from tiers.parsing import parse_json
from tiers.shards import FileRecord, parse_index
from tiers.store_metadata import FORMAT_VERSION, PROJECT_VERSION, read_shard_label

MANIFEST_NAME = "manifest.json"
_SUM = b'{"crc32c": '
"""How the first line begins that holds the sum of all lines after it: a flipped byte in a recipe is still a recipe."""
_STRICT = ConfigDict(strict=True, frozen=True, extra="forbid")
Count = Annotated[int, Field(ge=0)]


class SavedPosition(BaseModel):
    """Where in the data the next step begins."""

    model_config = _STRICT
    epoch: Count
    sequence: Count


class Facts(BaseModel):
    """What a run needs to go on as if it had not stopped."""

    model_config = _STRICT
    step: Count
    """Steps attempted when the checkpoint was taken; the next is step + 1."""
    applied_steps: Count
    """t of Adam's bias correction."""
    skipped_steps: Count
    data_position: SavedPosition
    data_fingerprint: str = ""
    """Of the data that the position counts in; empty where there is none."""
    bytes_tokenised: bool = False
    """Whether text was trained on as raw bytes, so that no tokenizer of the source belongs to the model."""
    seed: Count
    recipe: str
    """The resolved recipe, TOML."""
    device: str = ""
    """What computed the step, by whose kind sums round; empty where that is not known."""
    libraries: dict[str, str]
    """Version by name, for the reader of a bug report."""
    precision: Annotated[Precision, Field(strict=False)]
    num_parameters: Count


class Manifest(BaseModel):
    """The content of manifest.json."""

    model_config = _STRICT
    crc32c: Count | None = None
    """Of all that follows its line in the file; None where a version before 2026-12 wrote it."""
    format_version: int = FORMAT_VERSION
    project_version: str = PROJECT_VERSION
    created: datetime
    facts: Facts
    files: tuple[FileRecord, ...]

    @model_validator(mode="after")
    def _paths_stay_inside(self) -> Self:
        seen = set()
        for record in self.files:
            path = PurePosixPath(record.path)
            if path.is_absolute() or ".." in path.parts or str(path) != record.path or record.path in ("", "."):
                raise ValueError(f"file path {record.path!r} leaves the directory or is not in normal form")
            if record.path in seen:
                raise ValueError(f"file path {record.path!r} stands twice")
            seen.add(record.path)
            if record.stored_bytes and len(record.stored_bytes) != len(record.chunk_crc32c):
                raise ValueError(
                    f"{record.path!r} has {len(record.stored_bytes)} sizes of chunks and another number of sums"
                )
        return self

    def records(self) -> dict[str, FileRecord]:
        """The files by path."""
        return {record.path: record for record in self.files}


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Publish the manifest of a directory whose files are durable already; atomic.

    Raises:
        OSError: The disk refuses.
    """
    rest = manifest.model_dump_json(indent=1, exclude={"crc32c"}).encode().removeprefix(b"{\n")
    replace_file(directory / MANIFEST_NAME, b"%s%d,\n%s" % (_SUM, crc32c(rest), rest))


def read_manifest(directory: Path) -> Manifest:
    """Read and validate a manifest; the files are not looked at.

    Raises:
        CheckpointError: It is missing, unreadable, damaged, of a newer format, or breaks the schema.
    """
    path = directory / MANIFEST_NAME
    try:
        content = path.read_bytes()
        version = parse_json(content)["format_version"]
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {MANIFEST_NAME}: it was never completed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error!r}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}, this is version {FORMAT_VERSION} (project {PROJECT_VERSION}); "
            "use the project version that wrote it, or a later one"
        )
    first, _, rest = content.partition(b"\n")
    if first.startswith(_SUM) and first != b"%s%d," % (_SUM, crc32c(rest)):
        raise CheckpointError(f"{path} has another crc32c than its first line says; use an earlier checkpoint")
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest of format version {FORMAT_VERSION}: {error}") from error


def verify(directory: Path, *, deep: bool, threads: int = 4) -> list[str]:
    """List what is wrong with a checkpoint, each problem naming its file and, where it can, chunk and tensors.

    Args:
        directory: Of the checkpoint.
        deep: Whether to read every byte and compare checksums; otherwise presence and sizes alone, in milliseconds.
        threads: Threads that read when deep.

    Returns:
        Problems; empty where all is as the manifest says.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return [str(error)]
    problems = [problem for record in manifest.files if (problem := _size_problem(directory, record))]
    if problems or not deep:
        return problems
    with DirectIO(threads) as io:
        for record in manifest.files:
            try:
                with naming(directory / record.path):
                    problems += _content_problems(directory, record, io)
            except (ShardError, OSError) as error:
                problems.append(str(error))
    return problems


def check_metadata(directory: Path, manifest: Manifest) -> None:
    """Hold the small files of a checkpoint against its manifest, before zarr makes what it can of them.

    Raises:
        CheckpointError: One is missing or is not what was written.
    """
    for record in manifest.files:
        if record.chunk_bytes:
            continue
        try:
            intact = crc32c((directory / record.path).read_bytes()) == record.crc32c
        except OSError as error:
            raise CheckpointError(f"{directory / record.path} cannot be read: {error.strerror}") from error
        if not intact:
            raise CheckpointError(
                f"{directory / record.path} has another crc32c than the manifest; use an earlier checkpoint"
            )


def _size_problem(directory: Path, record: FileRecord) -> str | None:
    path = directory / record.path
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if not path.is_file() or not path.resolve().is_relative_to(directory.resolve()):
        return f"{path} is not a file inside the checkpoint"
    if num_bytes != record.num_bytes:
        return f"{path} has {num_bytes} bytes, the manifest says {record.num_bytes}"
    return None


def _content_problems(directory: Path, record: FileRecord, io: DirectIO) -> list[str]:
    path = directory / record.path
    if not record.chunk_bytes:
        content = path.read_bytes()
        return [] if crc32c(content) == record.crc32c else [f"{path} has another crc32c than the manifest"]
    num_chunks = len(record.chunk_crc32c)
    label = read_shard_label(path, record.chunk_bytes)
    if record.stored_bytes:
        deque(read_stored(path, record, label), maxlen=0)
        return []
    # Buffered: a checkpoint may lie on a read-only or network filesystem, and nobody waits for this.
    crcs = io.scan(path, DirectMode.BUFFERED, num_chunks * record.chunk_bytes, record.chunk_bytes)
    problems = [
        f"{label.chunk(number)} has another crc32c than the manifest"
        for number, (found, wanted) in enumerate(zip(crcs, record.chunk_crc32c, strict=True))
        if found != wanted
    ]
    with path.open("rb") as file:
        file.seek(num_chunks * record.chunk_bytes)
        index = file.read()
    parse_index(index, num_chunks, record.chunk_bytes, label)
    whole = joined_crc32c([*((crc, record.chunk_bytes) for crc in crcs), (crc32c(index), len(index))])
    if not problems and whole != record.crc32c:
        problems.append(f"{path}: its chunk index is not the one the manifest was made of")
    return problems
