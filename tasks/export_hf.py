"""Writes a checkpoint as a Hugging Face model directory that transformers and others load.

    python -m tasks.export_hf RUN_OR_CHECKPOINT OUT [--dtype source|bf16|fp16|fp32] [--max-shard-gib 5] [--untie]

Memory stays within one shard. OUT appears whole or not at all. Tied models are written as Hugging Face does, with the
embedding alone; `--untie` writes the head too, for tools that expect it. The tokenizer that the data was tokenised with
comes along; a model that was trained on text as bytes has none, and 256, the end of a document, in its config.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.command_line import CommandParser
from pipeline.recipe import RecipeError
from tasks.arguments import gibibytes
from tasks.hf_directory import DTYPES, ExportError, ExportSettings, export
from tasks.stored_model import StoredModel
from tiers.errors import CheckpointError, TierError

_GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 2 for a refusal, also by the disk, 1 for a failure: nothing of OUT is left then."""
    parser = CommandParser("tasks.export_hf", __doc__)
    parser.add_argument("source", type=Path, help="a run directory, whose newest checkpoint is taken, or a checkpoint")
    parser.add_argument("out", type=Path, help="the directory to make")
    parser.add_argument("--dtype", choices=["source", *DTYPES], default="source", help="type of the tensors")
    parser.add_argument("--max-shard-gib", type=gibibytes, metavar="X", default=5.0, help="most GiB a file")
    parser.add_argument("--untie", action="store_true", help="write the head of a tied model as a tensor of its own")
    options = parser.parse_args(arguments)
    settings = ExportSettings(options.dtype, int(options.max_shard_gib * _GIB), options.untie)
    try:
        model = StoredModel.open(options.source)
        written = export(model, options.out, settings)
    except (ExportError, CheckpointError, RecipeError, OSError) as error:
        return parser.refuse(error)
    except TierError as error:
        return parser.fail(error)
    print(f"exported step {model.manifest.facts.step} of {model.directory} to {written.directory}")
    print(f"tokenizer: {written.tokenizer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
