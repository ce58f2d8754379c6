"""A job takes the checkout along and nothing large, and runs the interpreter and recipe that the user meant."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cluster.errors import ClusterRefusedError
from cluster.submit import absolute
from cluster.working_dir import check, excludes


def sparse(path: Path, mebibytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, mebibytes << 20)


def test_history_environments_caches_and_ignored_files_stay_here(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("# large\ndata/\n/out\n\n*.bin\n")
    for name in (".git/pack", ".venv/lib", "a/__pycache__/x", "data/rows", "out/x", "a/b.bin", "runs/r/checkpoints/c"):
        sparse(tmp_path / name, 200)
    (tmp_path / "train.py").write_text("pass\n")
    assert check(tmp_path) == len("# large\ndata/\n/out\n\n*.bin\n") + len("pass\n")
    assert {".git", "data/", "*.bin"} <= set(excludes(tmp_path))


def test_too_large_a_directory_is_refused_and_its_largest_files_named(tmp_path: Path) -> None:
    for name, size in (("model/weights.pt", 2048), ("small", 1), ("b", 50)):
        sparse(tmp_path / name, size)
    with pytest.raises(ClusterRefusedError) as refusal:
        check(tmp_path)
    lines = str(refusal.value).splitlines()
    assert "3 files of 2099 MiB" in lines[0] and "limit is 100 MiB" in lines[0]
    assert lines[1].split() == ["2048.0", "MiB", "model/weights.pt"]


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterRefusedError, match="is not a directory"):
        check(tmp_path / "nowhere")


def test_python_is_this_interpreter_and_recipes_are_named_by_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    command = ["python", "-m", "tasks.train", "mine.toml", "--set", "run.name=other.toml"]
    assert absolute(command, tmp_path) == [sys.executable, *command[1:3], str(tmp_path / "mine.toml"), *command[4:]]
    assert absolute(["./program"], tmp_path) == ["./program"]
