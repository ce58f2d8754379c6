"""Measures this machine in under a minute and writes a hardware file that `tasks.plan --hardware` reads.

    python -m tasks.probe [--out FILE.toml] [--nvme-dir DIR] [--seconds S]

Progress goes to standard error; without --out the file goes to standard output; without --nvme-dir no drive is
measured.
Exit status: 0 measured, 2 the input is refused.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cluster.command_line import CommandParser, positive
from cluster.errors import OutputRefusedError
from cluster.output_file import OutputFile
from pipeline.prediction.hardware import GIB, Hardware, Host, hardware_toml
from tasks.probe_device import busy_device, measure_device, measure_link
from tasks.probe_host import copy_gbps, measure_nvme, update_gparams_per_s
from tiers.errors import ShardError
from tiers.host_memory import host_headroom
from tiers.processors import usable_cores
from tiers.quantities import shown_bytes

DEFAULT_SECONDS = 3.0
"""A measurement: rates settle in less, and a dozen of them stay below a minute."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        # Before the minute that it takes to measure.
        output = None if options.out is None else OutputFile.at(options.out)
        hardware = probe(options.nvme_dir, options.seconds)
        text = hardware_toml(hardware)
        if output is None:
            print(text, end="")
            return parser.printed(0)
        output.write(text.encode())
        print(f"wrote {output.path}", file=sys.stderr)
    except ShardError as error:
        return parser.refuse(f"--nvme-dir: {error}")
    except (OutputRefusedError, OSError) as error:
        return parser.refuse(error)
    return 0


def probe(nvme_dir: Path | None, seconds: float, progress: Callable[[str], None] | None = None) -> Hardware:
    """Measure this machine.

    Args:
        nvme_dir: Directory whose drive is measured; None measures none.
        seconds: Of each measurement.
        progress: Told what begins; None prints to standard error.

    Raises:
        ShardError: `nvme_dir` is missing, not writable, too full or faulty.
    """
    tell = progress or _printer()
    # First, because it alone depends on the user's input.
    nvme = None if nvme_dir is None else measure_nvme(nvme_dir, seconds, tell)
    cores = usable_cores()
    headroom = host_headroom()
    tell(f"{cores} cores; {shown_bytes(headroom.available_bytes)} of memory, bounded by {headroom.limit}")
    tell("copying memory")
    copied = copy_gbps(cores, seconds)
    tell("updating with AdamW, on idle memory")
    # A run leaves two cores to the driver and Compute.
    workers = max(1, cores - 2)
    alone = update_gparams_per_s(workers, seconds)
    tell("updating with AdamW, beside device and DMA")
    busy = update_gparams_per_s(workers, seconds, busy_device)
    tell("multiplying matrices on the device")
    device = measure_device(copied, seconds)
    tell("copying to and from the device")
    link = measure_link(copied, seconds)
    return Hardware(
        name=f"{device.name} on {platform.node()}",
        origin=f"measured by tasks.probe, {datetime.now(UTC):%Y-%m-%d}",
        device=device,
        link=link,
        host=Host(cores, headroom.available_bytes / GIB, copied, alone, busy),
        nvme=nvme,
    )


def _printer() -> Callable[[str], None]:
    start = time.monotonic()
    return lambda text: print(f"[{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)


def _parser() -> CommandParser:
    parser = CommandParser("tasks.probe", __doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write; default: standard output")
    parser.add_argument("--nvme-dir", type=Path, metavar="DIR", help="measure the drive behind this directory")
    parser.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        default=DEFAULT_SECONDS,
        help=f"of each measurement, default {DEFAULT_SECONDS:g}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
