"""A run's directory: left as it was found by a run that is refused, whatever others do beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.memory.footprint import Place, Term
from tasks.memory_account import AccountError, MemoryAccount
from tasks.run_directory import RunDirectory

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
