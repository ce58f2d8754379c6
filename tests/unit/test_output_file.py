"""`--out` replaces a file whole, follows links to it, and never puts a file where a device or a pipe was."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import OutputRefusedError
from cluster.output_file import OutputFile


def test_a_file_is_new_or_replaced_and_its_links_stay(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    target = tmp_path / "deep" / ("x" * 255)  # no longer name is possible: that of the part must be another
    (tmp_path / "link").symlink_to("deep/other")
    (tmp_path / "deep" / "other").symlink_to(target)
    for content in (b"first", b"2nd"):
        OutputFile.at(tmp_path / "link").write(content)
        assert target.read_bytes() == content and stat.S_IMODE(target.stat().st_mode) == 0o600
    assert (tmp_path / "link").is_symlink() and (tmp_path / "deep" / "other").is_symlink()
    assert len(list(tmp_path.rglob("*"))) == 4, "nothing else was left"


def test_devices_and_pipes_are_written_into_and_stay_what_they_are(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    link.symlink_to(os.devnull)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    OutputFile.at(pipe).write(b"x" * 100_000)
    assert len(reader.communicate()[0]) == 100_000
    OutputFile.at(link).write(b"x")
    assert pipe.is_fifo() and link.resolve().is_char_device()
    assert sorted(tmp_path.iterdir()) == [link, pipe]
    with pytest.raises(OSError, match="/dev/full"):
        OutputFile.at(Path("/dev/full")).write(b"x")


def test_standard_output_can_be_named_even_when_its_file_has_no_name_any_more(tmp_path: Path) -> None:
    program = "import os, sys\nfrom pathlib import Path\nfrom cluster.output_file import OutputFile\n"
    program += "if sys.argv[1:]: os.unlink(sys.argv[1])\nOutputFile.at(Path('/dev/stdout')).write(b'page')"
    piped = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True)
    assert piped.stdout == b"page", piped.stderr
    path = tmp_path / "page"
    with path.open("w+b") as file:
        subprocess.run([sys.executable, "-c", program, path], cwd=Path(__file__).parents[2], stdout=file, check=True)
        file.seek(0)
        assert file.read() == b"page" and list(tmp_path.iterdir()) == []


def test_what_takes_no_file_is_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path, why in (
            (tmp_path, "is a directory"),
            (tmp_path / "none" / "page", "does not exist"),
            (tmp_path / "socket", "no file, pipe or character device"),
        ):
            with pytest.raises(OutputRefusedError, match=f"--out {path}.* {why}"):
                OutputFile.at(path)
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", file / "page", tmp_path / ("x" * 300)):
        with pytest.raises(OSError, match=str(path)):
            OutputFile.at(path)
    for device in Path("/dev").iterdir():
        if device.is_block_device():
            with pytest.raises(OutputRefusedError, match="no file, pipe"):
                OutputFile.at(device)
