"""Says what a run directory, a checkpoint or a Hugging Face directory holds, without loading it.

    python -m tasks.inspect PATH [--tensors] [--verify]

Exit status: 0, 1 where --verify found damage, 2 where PATH is nothing known.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.command_line import CommandParser
from tasks.report_page.run_record import METRICS, read_run
from tasks.stored_model import StoredModel, find_checkpoint
from tiers.checkpoint import PARTIAL, newest_complete
from tiers.errors import ShardError, TierError
from tiers.manifest import MANIFEST_NAME, verify
from tiers.parsing import parse_json
from tiers.quantities import shown_bytes
from tiers.safetensors_directory import INDEX_NAME, read_directory
from tiers.safetensors_header import read_header

_SAFETENSORS = "*.safetensors"
_AS_WRITTEN = "every byte is as the manifest says"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 where `--verify` found damage, 2 where PATH is nothing known."""
    parser = CommandParser("tasks.inspect", __doc__)
    parser.add_argument("path", type=Path, help="a run directory, a checkpoint, or a Hugging Face model directory")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare checksums, where there are any"
    )
    options = parser.parse_args(arguments)
    path: Path = options.path
    problems = damage(path) if options.verify else []
    try:
        if (path / "checkpoints").is_dir():
            for line in run_lines(path):
                print(line)
        if any(path.glob(_SAFETENSORS)):
            lines = hugging_face_lines(path, tensors=options.tensors)
        else:
            lines = checkpoint_lines(find_checkpoint(path), tensors=options.tensors)
        for line in lines:
            print(line)
    except (TierError, OSError, ValueError) as error:
        if not problems:
            return parser.refuse(error)
    for problem in problems:
        print(f"damaged      {problem}")
    if options.verify and not problems:
        whole = "every header fits its file; there are no checksums" if any(path.glob(_SAFETENSORS)) else _AS_WRITTEN
        print(f"verified     {whole}")
    return parser.printed(1 if problems else 0)


def damage(path: Path) -> list[str]:
    """What is wrong with a checkpoint, a run directory's newest ones, or the files of a Hugging Face directory.

    Reads every byte of a checkpoint; of a run directory that of the newest whose files are all there in their size.
    """
    if any(path.glob(_SAFETENSORS)):
        return _hugging_face_damage(path)
    if any((path / name).is_file() for name in (MANIFEST_NAME, "zarr.json")):
        return verify(path, deep=True)
    newest, skipped = newest_complete(path)
    # What a writer that died left is no damage: it never was a checkpoint.
    problems = [f"{each.path}: {each.reason}" for each in skipped if each.path.suffix != PARTIAL]
    return problems + (verify(newest, deep=True) if newest is not None else [])


def _hugging_face_damage(directory: Path) -> list[str]:
    problems = []
    for file in sorted(directory.glob(_SAFETENSORS)):
        try:
            read_header(file)
        except (ShardError, OSError) as error:
            problems.append(str(error))
    if not problems and (directory / INDEX_NAME).exists():
        try:
            read_directory(directory)
        except (TierError, OSError) as error:
            problems.append(str(error))
    return problems


def run_lines(run_dir: Path) -> Iterator[str]:
    """What a run directory has beside its newest checkpoint."""
    newest, skipped = newest_complete(run_dir)
    complete = sorted(path.parent.name for path in (run_dir / "checkpoints").glob(f"*/{MANIFEST_NAME}"))
    yield f"run          {run_dir.absolute()}"
    if (run_dir / METRICS).is_file():
        record = read_run(run_dir)
        losses = [loss for loss in record.column("loss") if math.isfinite(loss)]
        if losses:
            yield f"trained      {len(record.steps)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        if record.unreadable_lines:
            yield f"unreadable   {record.unreadable_lines} lines of its rows: a kill may have cut the last one short"
    yield f"checkpoints  {', '.join(complete) or 'none'}; newest complete: {newest.name if newest else 'none'}"
    for skip in skipped:
        yield f"incomplete   {skip.path.name}: {skip.reason}"


def checkpoint_lines(directory: Path, *, tensors: bool) -> Iterator[str]:
    """What a checkpoint holds."""
    model = StoredModel.open(directory)
    facts = model.manifest.facts
    yield f"checkpoint   {directory.absolute()}"
    yield f"written      {model.manifest.created:%Y-%m-%d %H:%M:%S %Z}, project {model.manifest.project_version}"
    yield f"step         {facts.step} ({facts.applied_steps} applied, {facts.skipped_steps} skipped)"
    yield f"data         epoch {facts.data_position.epoch}, sequence {facts.data_position.sequence}"
    yield f"parameters   {facts.num_parameters:,}, {facts.precision}{', head tied to embedding' if model.tied else ''}"
    sizes: Counter[str] = Counter()
    for record in model.manifest.files:
        # layer/buffer/c/0 is a shard; the rest is metadata.
        parts = record.path.split("/")
        sizes[parts[1] if record.chunk_bytes and len(parts) > 1 else "metadata"] += record.num_bytes
    for name, num_bytes in sizes.items():
        yield f"{name:<12} {shown_bytes(num_bytes)}"
    yield f"total        {shown_bytes(sizes.total())} in {len(model.manifest.files)} files"
    yield f"libraries    {', '.join(f'{name} {version}' for name, version in facts.libraries.items())}"
    for tensor in model.tensors if tensors else ():
        yield f"  {tensor.layer:<12} {tensor.name:<60} {list(tensor.shape)}"


def hugging_face_lines(directory: Path, *, tensors: bool) -> Iterator[str]:
    """What a Hugging Face directory holds, from the headers of its files."""
    held = [tensor for path in sorted(directory.glob(_SAFETENSORS)) for tensor in read_header(path)]
    numels: Counter[str] = Counter()
    for tensor in held:
        numels[tensor.dtype] += math.prod(tensor.shape)
    yield f"Hugging Face {directory.absolute()}"
    yield f"model        {_model_line(directory / 'config.json')}"
    yield f"parameters   {numels.total():,} ({', '.join(f'{dtype} {numel:,}' for dtype, numel in numels.items())})"
    yield f"tensors      {len(held)} in {len({tensor.path for tensor in held})} files"
    for tensor in held if tensors else ():
        yield f"  {tensor.path.name:<34} {tensor.name:<60} {tensor.dtype} {list(tensor.shape)}"


def _model_line(path: Path) -> str:
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except ValueError as error:
        raise ShardError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ShardError(f"{path} holds no table of fields")
    return f"{config.get('model_type')}, dtype {config.get('dtype', config.get('torch_dtype'))}"


if __name__ == "__main__":
    sys.exit(main())
