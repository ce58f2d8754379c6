"""Sizes on a command line have the limit that those of a recipe have: beyond it no count of bytes can be computed."""

from __future__ import annotations

import pytest

from tasks import export_hf
from tasks.arguments import gibibytes
from tasks.bench import __main__ as bench


@pytest.mark.parametrize("size", ["1e308", "1048577", "0", "-1", "nan", "inf", "x"])
def test_sizes_beyond_every_machine_are_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, arguments in ((export_hf, ["run", "out", "--max-shard-gib"]), (bench, ["tier", "--gib"])):
        with pytest.raises(SystemExit) as ended:
            command.main([*arguments, size])
        assert ended.value.code == 2
        told = f"argument {arguments[-1]}: must be a number above 0, at most 1048576, got '{size}'"
        assert told in capsys.readouterr().err


def test_other_sizes_are_taken() -> None:
    assert [gibibytes(size) for size in ("5", "0.25", "1048576")] == [5.0, 0.25, 2.0**20]
