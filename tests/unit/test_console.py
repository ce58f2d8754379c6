"""What a command prints cannot fail it: its reader is gone, a disk is full, a stream closed, a name is no text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from cluster import console
from cluster.command_line import CommandParser

REPOSITORY = Path(__file__).resolve().parents[2]

COMMAND = """
import logging, os, sys
from cluster.command_line import CommandParser
parser = CommandParser("tasks.some", __doc__)
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
for number in range(3):
    print("step", number, "x" * 10_000, flush=True)
    logging.info("said")
    print("note", file=sys.stderr, flush=True)
opened = os.open(os.devnull, os.O_RDONLY)
assert opened > 2, "its number is that of a standard stream: what libraries print there would go into a file"
os.write(int(sys.argv[1]), b"went on to its end")
print("left in the buffer")
sys.exit(parser.printed(0) if "printed" in sys.argv else 0)
"""

CASES = {
    "the reader of both is gone": (">&$GONE 2>&$GONE", 0),
    "the reader is gone and printing was all": ("printed >&$GONE", 0),
    "a full disk": (">/dev/full 2>/dev/full", 0),
    "a full disk and printing was all": ("printed >/dev/full", 2),
    "closed": ("printed >&- 2>&-", 0),
}


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("case", CASES)
def test_a_command_goes_on_to_its_end_and_its_status_is_that_of_its_work(case: str, buffered: bool) -> None:
    how, status = CASES[case]
    told, tell = os.pipe()
    unread, gone = os.pipe()
    os.close(unread)
    ended = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" $TELL {how}', sys.executable, COMMAND],
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "GONE": str(gone), "TELL": str(tell)}
        | ({} if buffered else {"PYTHONUNBUFFERED": "1"}),
        pass_fds=(tell, gone),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(tell)
    os.close(gone)
    with os.fdopen(told) as end:
        assert end.read() == "went on to its end", ended.stderr
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr and "Errno" not in ended.stderr
    assert ("some: refused: " in ended.stderr and "No space left on device" in ended.stderr) == (status == 2)


def redirect(monkeypatch: pytest.MonkeyPatch, output: TextIO) -> None:
    """Until the test's end. Not in a fixture: pytest puts its own streams back between set-up and test."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "stdout", output)


def test_characters_that_the_output_lacks_are_escaped_and_bytes_of_names_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "out"
    redirect(monkeypatch, written.open("w", encoding="ascii"))  # and strict, as Python opens it
    console.install()
    sys.stdout.write("café \udcfc\n")
    sys.stdout.flush()
    sys.stdout.write("\udcfc alone \ud800\n")
    assert console.lost() is None
    assert written.read_bytes().splitlines() == [b"caf\\xe9 \xfc", b"\xfc alone \\ud800"]


def test_output_goes_where_it_went_and_twice_is_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "out"
    redirect(monkeypatch, written.open("w"))
    sys.stdout.write("before\n")
    CommandParser("tasks.some", "")
    first = sys.stdout
    CommandParser("tasks.some", "")
    assert sys.stdout is first
    sys.stdout.write("after\n")
    assert CommandParser("tasks.some", "").printed(1) == 1
    assert written.read_text() == "before\nafter\n" and sys.stdout.fileno() > 2 and not sys.stdout.isatty()


def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    reader = subprocess.Popen(["wc", "-c"], stdin=readable, stdout=subprocess.PIPE)
    os.close(readable)
    with os.fdopen(writable, "w") as output:
        redirect(monkeypatch, output)
        console.install()
        sys.stdout.write("x" * 1_000_000)
        assert console.lost() is None
    assert int(reader.communicate()[0]) == 1_000_000
