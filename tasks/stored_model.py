"""A checkpoint as a model to be read: its tensors by name, through plain zarr, a tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import zarr

from pipeline.recipe import Recipe, parse_recipe
from tiers.checkpoint import newest_complete
from tiers.errors import CheckpointError
from tiers.layout import Buffer, Precision
from tiers.manifest import MANIFEST_NAME, Manifest, check_metadata, read_manifest
from tiers.master import join_master


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """Where a tensor lies in a checkpoint."""

    name: str
    """Full Hugging Face name."""
    shape: tuple[int, ...]
    layer: str
    offset: int
    """First element in the layer's flat buffers."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StoredModel:
    """A complete checkpoint."""

    directory: Path
    manifest: Manifest
    tied: bool
    """Whether the LM head is the embedding matrix and not stored apart."""
    tensors: tuple[ModelTensor, ...]
    """In forward order."""

    @classmethod
    def open(cls, path: Path) -> StoredModel:
        """Open a checkpoint.

        Args:
            path: A checkpoint, or a run directory, whose newest complete checkpoint is taken.

        Raises:
            CheckpointError: There is none, or it is not readable.
        """
        directory = find_checkpoint(path)
        manifest = read_manifest(directory)
        check_metadata(directory, manifest)
        try:
            root = zarr.open_group(directory, mode="r")
            layers = cast(list[str], root.attrs["layers"])
            tensors = tuple(tensor for layer in layers for tensor in _tensors(root, layer))
            return cls(directory, manifest, bool(root.attrs["tied"]), tensors)
        except (KeyError, TypeError, FileNotFoundError) as error:
            raise CheckpointError(
                f"{directory} has no layers or tensor tables as a checkpoint has: {error!r}"
            ) from error

    @property
    def precision(self) -> Precision:
        """How the master is kept."""
        return self.manifest.facts.precision

    def recipe(self) -> Recipe:
        """The run's resolved recipe."""
        return parse_recipe(self.manifest.facts.recipe, f"the recipe in {self.directory / MANIFEST_NAME}")

    def read(self, tensor: ModelTensor, dtype: torch.dtype) -> torch.Tensor:
        """Read a tensor from the master.

        Args:
            tensor: One of `tensors`.
            dtype: float32 gives the master as it is. bfloat16 of a bf16 model gives the very weights it computed with
                (ties of the rounding away from zero); everything else rounds the master to nearest even.

        Returns:
            A new tensor [tensor.shape] on the CPU.
        """
        weight = self._elements(tensor, Buffer.WEIGHT)
        if self.precision is Precision.FP32:
            flat = torch.from_numpy(weight)
        elif dtype == torch.bfloat16:
            flat = torch.from_numpy(weight).view(torch.bfloat16)
        else:
            flat = torch.from_numpy(join_master(weight, self._elements(tensor, Buffer.WEIGHT_LOW)))
        return flat.to(dtype).reshape(tensor.shape)

    def _elements(self, tensor: ModelTensor, buffer: Buffer) -> npt.NDArray[Any]:
        array = cast(zarr.Array, zarr.open_group(self.directory, mode="r")[f"{tensor.layer}/{buffer}"])  # type: ignore[type-arg]
        return np.ascontiguousarray(array[tensor.offset : tensor.offset + tensor.numel])


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest complete one of the run directory that it is.

    Raises:
        CheckpointError: There is none; what was passed over is named.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    newest, skipped = newest_complete(path)
    if newest is None:
        reasons = "".join(f"\n  {skip.path}: {skip.reason}" for skip in skipped)
        raise CheckpointError(f"{path} is no checkpoint, and no run directory with a complete one{reasons}")
    return newest


def _tensors(root: zarr.Group, layer: str) -> Iterator[ModelTensor]:
    table = cast(list[dict[str, object]], root[f"{layer}/{Buffer.WEIGHT}"].attrs["tensors"])
    for row in table:
        shape = tuple(cast(list[int], row["shape"]))
        yield ModelTensor(cast(str, row["name"]), shape, layer, cast(int, row["offset"]))
