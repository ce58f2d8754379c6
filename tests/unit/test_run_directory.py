"""A run's directory: left as it was found by a run that is refused, whatever others do beside it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from pipeline.memory.footprint import Place, Term
from tasks.memory_account import AccountError, MemoryAccount
from tasks.run_directory import LOCK_NAME, RunDirectory, RunDirectoryError

ACCOUNT = MemoryAccount("llama", 10, (Term(Place.RAM, "weights", 20, "bf16"), Term(Place.NVME, "state", 100, "Adam")))


def test_what_was_made_for_a_run_that_never_began_is_removed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "new" / "deep" / "run"):
        (tmp_path / "new" / "deep" / "run" / "data").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_takes_no_other_run_with_it(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "new" / "refused"), RunDirectory(tmp_path / "new" / "other") as other:
        other.keep("name", ACCOUNT)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


def test_the_directory_of_a_run_that_began_stays(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        directory.keep("name", ACCOUNT)
    assert (tmp_path / "run" / "recipe.toml").read_text() == "name"


def test_the_account_of_memory_reads_back_equal_and_a_damaged_one_says_so(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        directory.keep("name", ACCOUNT)
    assert MemoryAccount.read(tmp_path) == ACCOUNT
    whole = (tmp_path / "memory.json").read_text()
    for text in (
        "",
        "[]",
        whole.replace(": 1,", ": 9,", 1),
        whole.replace('"ram"', '"rom"'),
        whole.replace("20", "null"),
    ):
        (tmp_path / "memory.json").write_text(text)
        with pytest.raises(AccountError, match=r"memory\.json"):
            MemoryAccount.read(tmp_path)
    (tmp_path / "memory.json").unlink()
    with pytest.raises(AccountError, match="missing"):
        MemoryAccount.read(tmp_path)


def test_a_refused_run_leaves_a_directory_that_was_there_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("notes")
    with RunDirectory(tmp_path):
        (tmp_path / "data" / "tokens").mkdir(parents=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with RunDirectory(tmp_path) as directory:
        directory.keep("name", ACCOUNT)
        (tmp_path / "data").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with RunDirectory(tmp_path):
        pass
    assert sorted(tmp_path.rglob("*")) == before and tmp_path / "run.lock" in before


@pytest.mark.parametrize("run_dir", ["", "new"])
def test_a_lock_that_was_removed_while_it_was_waited_for_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str
) -> None:
    """A second starter has opened the file of one that is refused just then, before it can lock it."""
    path, lock = tmp_path / run_dir, fcntl.flock
    first = RunDirectory(path).__enter__()

    def after_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.__exit__(None, None, None)
        assert not (path / LOCK_NAME).exists()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", after_first)
    with RunDirectory(path), pytest.raises(RunDirectoryError, match=f"in use by the run of process {os.getpid()}"):
        RunDirectory(path).__enter__()
    assert list(tmp_path.iterdir()) == []
