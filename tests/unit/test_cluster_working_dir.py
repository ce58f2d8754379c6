"""A job takes the checkout along and nothing large, and runs the interpreter and recipe that the user meant."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

from cluster.errors import ClusterRefusedError
from cluster.submit import absolute
from cluster.working_dir import EXCLUDES, check, taken


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


def test_too_large_a_directory_is_refused_and_its_largest_files_named(tmp_path: Path) -> None:
    for name, size in (("model/weights.pt", 2048), ("small", 1), ("b", 50)):
        sparse(tmp_path / name, size)
    with pytest.raises(ClusterRefusedError) as refusal:
        check(tmp_path)
    lines = str(refusal.value).splitlines()
    assert "3 files of 2099 MiB" in lines[0] and "limit is 100 MiB" in lines[0]
    assert lines[1].split() == ["2048.0", "MiB", "model/weights.pt"]


def test_what_is_looked_at_is_what_ray_packs(tmp_path: Path) -> None:
    """Links, folders of none, rules within rules: a file that Ray sees and the check does not is `status code 413`."""
    elsewhere, work = tmp_path / "elsewhere", tmp_path / "work"
    for name in (
        *("a.py", "b.bin", "kept.bin", "data/x", "in/data/y", "sub/a.txt", "sub/deep/b.txt", "sub/c.txt", "own/x"),
        *("ray/x", "ray/y", "logs/deep/a.log", "logs/a.log", ".venv/x", "runs", "m.safetensors", "ü 空", "gone/x"),
    ):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name * 10)
    (work / ".gitignore").write_text("*.bin\n!kept.bin\n/data/\nlogs/*.log\ngone\n")
    (work / "sub" / ".gitignore").write_text("/a.txt\nb.txt\n")
    (work / "own" / ".gitignore").write_text("*\n")
    (work / "ray" / ".rayignore").write_text("y\n")
    (work / "empty").mkdir()
    (elsewhere / "folder" / "empty").mkdir(parents=True)
    (elsewhere / "folder" / "large").write_text("x" * 1000)
    (work / "linked").symlink_to(elsewhere / "folder")
    (work / "twice").symlink_to("linked")
    (work / "one").symlink_to(elsewhere / "folder" / "large")
    (work / "nothing").symlink_to("nowhere")
    (work / "itself").symlink_to("itself")
    os.mkfifo(work / "gone" / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(work / "socket"))
    package = tmp_path / "package.zip"
    create_package(str(work), package, include_gitignore=True, excludes=list(EXCLUDES))
    with ZipFile(package) as packed:
        wanted = {entry.filename.rstrip("/"): entry.file_size for entry in packed.infolist()}
    found = {str(file.path): file.num_bytes for file in taken(work)}
    assert found == wanted and {"linked/large", "twice/empty", "kept.bin", "one"} <= found.keys()
    assert not {"b.bin", "sub/a.txt", "own/x", "ray/y", "nothing"} & found.keys()
    # The dashboard takes less than its limit, of an archive that is larger than its files.
    check(work, package.stat().st_size + 100)
    with pytest.raises(ClusterRefusedError, match="files of 0 MiB"):
        check(work, package.stat().st_size)


def test_a_link_to_a_large_folder_counts(tmp_path: Path) -> None:
    sparse(tmp_path / "elsewhere" / "model", 130)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "link").symlink_to("../elsewhere")
    with pytest.raises(ClusterRefusedError, match="1 files of 130 MiB"):
        check(tmp_path / "work")


def test_what_ray_cannot_pack_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    pipe, loop, ignore = tmp_path / "sub" / "pipe", tmp_path / "sub" / "loop", tmp_path / "sub" / ".gitignore"
    name = Path(os.fsdecode(bytes(tmp_path / "sub") + b"/\xff.txt"))

    def refused(said: str) -> None:
        with pytest.raises(ClusterRefusedError, match=said):
            check(tmp_path)

    os.mkfifo(pipe)
    refused("sub/pipe in the working directory is a pipe or a device")
    pipe.unlink()
    pipe.symlink_to("/dev/zero")
    refused("sub/pipe in the working directory is a pipe or a device")
    pipe.unlink()
    loop.symlink_to(tmp_path)
    refused("sub/loop in the working directory leads back")
    loop.unlink()
    name.touch()
    refused(r"sub/.udcff.txt' in the working directory has a name that is not UTF-8")
    name.unlink()
    ignore.write_bytes(b"# \xfc\n")
    refused("sub/.gitignore in the working directory is nothing that Ray can read")
    ignore.write_text("# ü\n")
    assert check(tmp_path) == 5


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterRefusedError, match="is not a directory"):
        check(tmp_path / "nowhere")


def test_python_is_this_interpreter_and_recipes_are_named_by_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    command = ["python", "-m", "tasks.train", "mine.toml", "--set", "run.name=other.toml"]
    assert absolute(command, tmp_path) == [sys.executable, *command[1:3], str(tmp_path / "mine.toml"), *command[4:]]
    assert absolute(["./program"], tmp_path) == ["./program"]
