"""Checks a Hugging Face model directory and writes it as a store that runs start from.

    python -m tasks.import_hf SRC STORE [--precision bf16|fp32] [--threads N]

A recipe then says `[model] source = "STORE"`: weights come in at disk speed, checked by checksum, and SRC may go.
`tasks.inspect` and `tasks.export_hf` read a store as they read a run. STORE appears whole or not at all.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.command_line import CommandParser, count
from pipeline.errors import PipelineError
from tasks.model_import import import_model
from tiers.errors import TierError
from tiers.layout import Precision
from tiers.processors import usable_cores
from tiers.quantities import shown_duration

MAX_THREADS = 8
"""Disk requests in flight that saturate the drives measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 for a refusal: nothing of STORE is left then."""
    parser = CommandParser("tasks.import_hf", __doc__)
    parser.add_argument("source", type=Path, help="Hugging Face model directory: config.json and safetensors")
    parser.add_argument("store", type=Path, help="the directory to make")
    parser.add_argument(
        "--precision", choices=[p.value for p in Precision], default="bf16", help="precision.mode of the runs to come"
    )
    parser.add_argument(
        "--threads",
        type=count,
        metavar="N",
        default=min(MAX_THREADS, usable_cores()),
        help="disk requests in flight",
    )
    options = parser.parse_args(arguments)
    say = partial(print, flush=True)
    started_s = time.monotonic()
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        store = import_model(options.source, options.store, Precision(options.precision), options.threads, say)
    except (ValueError, TierError, PipelineError, OSError) as error:
        return parser.refuse(error)
    finally:
        signal.signal(signal.SIGTERM, before)
    took = shown_duration(time.monotonic() - started_s)
    say(f'imported {options.source} in {took}; in a recipe: [model] source = "{store}"')
    return 0


def _leave(signum: int, _frame: object) -> None:
    """Unwind, so that what was begun is removed."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
