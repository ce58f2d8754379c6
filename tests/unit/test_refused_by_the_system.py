"""Full disks and wrong paths at the edge: one message with the path and what to do, status 2, nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.command_line import in_words
from support.small_disk import small_filesystem
from support.small_recipe import write_one_step
from tasks import plan, probe, report, train
from tasks.memory_account import MemoryAccount
from tasks.run_directory import RunDirectory, RunDirectoryError
from tiers.durable_files import new_directory, replace_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_one_step(tmp_path, words=100_000)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem that takes names and no byte."""
    with small_filesystem(tmp_path / "disk", 1) as path:
        free = os.statvfs(path)
        with (path / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize)
        yield path


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error, error
    return error


def test_a_dry_run_on_a_full_disk(path: Path, full_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main((str(path), "--dry-run", "--set", f"run.dir={full_disk / 'run'}")) == 2
    assert f"run.dir = {full_disk / 'run'} has no room for the run's checkpoints" in error_of(capsys)
    assert train.main((str(path), "--dry-run", "--set", f"data.cache_dir={full_disk / 'cache'}")) == 2
    error = error_of(capsys)
    assert f"cannot read or write {full_disk / 'cache'}" in error and "(ENOSPC); free space there" in error
    assert list((full_disk / "cache").iterdir()) == [] and not (path.parent / "run").exists()


def test_a_run_directory_that_a_full_disk_refuses_is_named_and_leaves_nothing(full_disk: Path) -> None:
    run_dir = full_disk / "deep" / "run"
    with pytest.raises(RunDirectoryError, match=rf"run\.dir = {run_dir} cannot be used: No space .*free space there"):
        RunDirectory(run_dir).__enter__()
    assert [entry.name for entry in full_disk.iterdir()] == ["ballast"]


def test_small_files_and_new_directories_name_themselves(full_disk: Path) -> None:
    with pytest.raises(OSError, match=str(full_disk / "page.html")):
        replace_file(full_disk / "page.html", b"x" * 100_000)
    with pytest.raises(OSError, match=str(full_disk / "new")), new_directory(full_disk / "new") as partial:
        (partial / "a").write_bytes(b"x" * 100_000)
    assert not (full_disk / "new").exists()


def test_a_report_to_a_place_that_takes_none(
    path: Path, tmp_path: Path, full_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        directory.keep(path.read_text(), MemoryAccount("llama", 1, ()))
    for out, why in (
        (tmp_path / "none" / "page.html", "name a file in a directory that exists"),
        (full_disk / "page.html", "free space there"),
        (tmp_path / ("x" * 300), "give it a shorter name"),
    ):
        assert report.main((str(tmp_path / "run"), "--out", str(out))) == 2
        error = error_of(capsys)
        assert str(out) in error and why in error
    assert report.main((str(path / "run"),)) == 2
    assert str(path / "run") in error_of(capsys)


@pytest.mark.parametrize("command", [plan, train], ids=["plan", "train"])
def test_paths_through_a_file_are_refused(command: object, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = path / "inside"  # a file is no directory
    for key in ("run.dir", "memory.nvme_dir", "run.resume"):
        if command is plan and key == "run.dir":
            continue  # nothing is written
        status = command.main((str(path), "--set", f"{key}={inside}"))  # type: ignore[attr-defined]
        if key == "run.resume" and command is plan:
            continue
        assert status == 2, key
        assert str(inside) in error_of(capsys)


def test_a_name_that_is_too_long_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (plan, train):
        assert command.main((str(path), "--set", f"run.dir={path.parent / ('x' * 300)}")) == 2
        assert "x" * 300 in error_of(capsys)


def test_a_plan_that_nobody_gets_for_want_of_room_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert plan.main((str(path),)) == 2
    assert "No space left on device" in error_of(capsys)


def test_a_probe_asks_for_its_file_before_it_measures(full_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", full_disk], check=True)
    assert probe.main(("--out", str(full_disk / "machine.toml"))) == 2
    assert "is not writable" in error_of(capsys)


def test_words_of_an_error_have_the_path_and_what_to_do() -> None:
    for number in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EXDEV):
        told = in_words(OSError(number, os.strerror(number), "/a/b"))
        assert "/a/b" in told and errno.errorcode[number] in told and told.partition("; ")[2]
    assert "output" in in_words(OSError(errno.ENOSPC, "No space left on device"))
    assert in_words(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) == "[Errno 111] refused"
    assert in_words(ValueError("as it is")) == "as it is"
