"""A run's directory: left as it was found by a run that is refused, whatever others do beside it."""

from __future__ import annotations

from pathlib import Path

from tasks.run_directory import RunDirectory


def test_what_was_made_for_a_run_that_never_began_is_removed(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "new" / "deep" / "run"):
        (tmp_path / "new" / "deep" / "run" / "data").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_takes_no_other_run_with_it(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "new" / "refused"), RunDirectory(tmp_path / "new" / "other") as other:
        other.keep("name")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


def test_the_directory_of_a_run_that_began_stays(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        directory.keep("name")
    assert (tmp_path / "run" / "recipe.toml").read_text() == "name"
