"""Makes one self-contained HTML page of a run: loss, speed, stalls, the lanes of a step, where the bytes live.

    python -m tasks.report RUN [--out FILE] [--step N]

The page needs no network and may be passed on: it holds the run's recipe and figures, nothing of model or data. A run
that is still going on, was cut short or has no step yet has a page too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.command_line import CommandParser, count
from cluster.errors import OutputRefusedError
from cluster.output_file import OutputFile
from tasks.memory_account import AccountError, MemoryAccount
from tasks.report_page.page import page
from tasks.report_page.run_events import index_events, read_step
from tasks.report_page.run_record import ReportError, read_run

DEFAULT_NAME = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 for a refusal."""
    parser = CommandParser("tasks.report", __doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the page's file (RUN/{DEFAULT_NAME}); an older one is replaced"
    )
    parser.add_argument(
        "--step", type=count, metavar="N", help="step whose lanes are shown; default: one of median length"
    )
    options = parser.parse_args(arguments)
    out: Path = options.out or options.run / DEFAULT_NAME
    try:
        write_report(options.run, out, options.step)
    except (ReportError, OutputRefusedError, OSError) as error:
        return parser.refuse(error)
    print(f"report of {options.run} in {out.absolute()}")
    return 0


def write_report(run: Path, out: Path, step: int | None = None) -> None:
    """Write the page of `run` to `out`, a file whole or not at all.

    Args:
        run: A run directory.
        out: A file, whose directory must exist, a link to one, a pipe or a device.
        step: Whose lanes are shown; None takes one of median length.

    Raises:
        ReportError: `run` is no run directory, or the step was not recorded.
        OutputRefusedError: `out` is nothing that can be written.
        OSError: A file cannot be read or written.
    """
    record = read_run(run)
    output = OutputFile.at(out)
    index = index_events(record)
    lanes = read_step(record, index, step)
    output.write(page(record, lanes, _account(run)).encode())


def _account(run: Path) -> MemoryAccount | str:
    """Where the run's bytes live; a reason in words where that is not known."""
    try:
        return MemoryAccount.read(run)
    except AccountError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
