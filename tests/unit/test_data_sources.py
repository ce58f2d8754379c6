"""Every file of the data is found or refused by name: none is passed over, and none is read that may have no end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.recipe import RecipeError, load_recipe
from support.small_recipe import write_one_step
from tasks.data.settings import DataError, DataSettings
from tasks.data.sources import find_files
from tasks.preparation import data_settings


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def found(folder: Path, path: str = "", **settings: object) -> list[str]:
    files = find_files(DataSettings(paths=(folder / path,), **settings))  # type: ignore[arg-type]
    return [file.path.relative_to(folder).as_posix() for file in files]


def test_links_to_folders_are_followed_and_circles_end(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(tmp_path, "data/a/one.txt", "elsewhere/two.txt", "elsewhere/deep/three.txt")
    (data / "a" / "up").symlink_to(data)
    (data / "self").symlink_to(".")
    (data / "0").symlink_to(data / "a")
    (data / "part").symlink_to(tmp_path / "elsewhere")
    (data / "four.txt").symlink_to(tmp_path / "elsewhere" / "two.txt")
    # A folder keeps its own name although a link to it comes first, and a file of several names is read once.
    assert found(data) == ["a/one.txt", "four.txt", "part/deep/three.txt"]
    assert found(data, "**/*.txt") == ["a/one.txt", "four.txt", "part/deep/three.txt"]
    assert found(data, "**") == found(data, "*") == found(data)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["a.txt", "b/c.txt", "b/d/e.jsonl", "notes"]),
        ("b", ["b/c.txt", "b/d/e.jsonl"]),
        ("[b]", ["b/c.txt", "b/d/e.jsonl"]),
        ("*/*.txt", ["b/c.txt"]),
        ("*/d", ["b/d/e.jsonl"]),
        ("*/d/*", ["b/d/e.jsonl", "b/d/x.weird"]),
        ("**/*.txt", ["a.txt", "b/c.txt"]),
        ("b/**", ["b/c.txt", "b/d/e.jsonl", "b/d/x.weird"]),
        ("**/d/*.jsonl", ["b/d/e.jsonl"]),
        (".*", [".hidden/f.txt"]),
        ("notes/*", None),
        ("a.txt/*.txt", None),
        ("none/*", None),
    ],
)
def test_globs_match_files_and_whole_folders(tmp_path: Path, pattern: str, names: list[str] | None) -> None:
    write(tmp_path, "a.txt", "notes", "b/c.txt", "b/d/e.jsonl", "b/d/x.weird", ".hidden/f.txt", "b/.g.txt")
    (tmp_path / "b" / "lost+found").mkdir()
    if names is None:
        with pytest.raises(DataError, match="matches no file"):
            found(tmp_path, pattern)
    else:
        assert found(tmp_path, pattern) == names


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))


def a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("gone")


def a_circle(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("how", ["", "bad.txt", "*", "*.txt", "**/*.txt"], ids=repr)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (a_pipe, "is a named pipe; data are read from regular files"),
        (a_socket, "is a socket"),
        (a_device, "is a character device"),
        (a_dangling_link, "is a link to gone, which does not exist"),
        (a_circle, "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_is_no_regular_file_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], told: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "good.txt")
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    make(Path("bad.txt"))
    with pytest.raises(DataError, match=rf"bad\.txt {told}"):
        found(tmp_path, how)


def test_a_device_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path /dev/null is a character device"):
        found(tmp_path, "/dev/null")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("how", ["", "*", "*/*.txt", "**/*.txt", "locked/*", "*/inner/*.txt"], ids=repr)
def test_a_folder_that_cannot_be_read_is_refused_by_name(open_folder: Path, how: str) -> None:
    write(open_folder, "good.txt", "locked/inner/bad.txt", "open/inner/good.txt")
    (open_folder / "locked").chmod(0o000)

    def attempt() -> None:
        if not os.geteuid():
            ctypes.CDLL(None).setuid(65534)
        with pytest.raises(DataError, match=r"locked.* cannot be read: Permission denied; change its mode"):
            found(open_folder, how)

    child = multiprocessing.get_context("fork").Process(target=attempt)
    child.start()
    child.join(60)
    (open_folder / "locked").chmod(0o700)
    assert child.exitcode == 0


def test_what_the_run_writes_inside_a_folder_of_data_is_no_data(tmp_path: Path) -> None:
    recipe_path = write_one_step(tmp_path, words=10)
    data = tmp_path / "corpus"
    write(data, "a.txt", "run/metrics.jsonl", "cache/x/header.json", "nvme/zarr.json", "run/mine/b.txt")
    own = [f"run.dir={data}/run", f"data.cache_dir={data}/cache", f"memory.nvme_dir={data}/nvme"]
    for path, names in (
        ("", ["a.txt"]),
        ("*", ["a.txt"]),
        ("**", ["a.txt"]),
        ("*/*.json*", None),
        ("run/mine", ["run/mine/b.txt"]),  # the user's own choice
        ("run/mine/*.txt", ["run/mine/b.txt"]),
        ("run/metrics.jsonl", ["run/metrics.jsonl"]),
    ):
        settings, _ = data_settings(load_recipe(recipe_path, [*own, f"data.path={data / path}"]))
        if names is None:
            with pytest.raises(DataError, match="matches no file"):
                find_files(settings)
        else:
            assert [file.path.relative_to(data).as_posix() for file in find_files(settings)] == names


@pytest.mark.parametrize(
    ("own", "path", "told"),
    [
        ("run.dir={}", "{}", "run.dir"),
        ("run.dir={}", "{}/*.txt", "run.dir"),
        ("run.dir={}/link", "{}", "run.dir"),
        ("run.dir={}/run", "{}/run/data", "data.cache_dir"),
        ("data.cache_dir={}", "{}", "data.cache_dir"),
        ("memory.nvme_dir={}", '["/none.txt", "{}/**"]', "memory.nvme_dir"),
    ],
)
def test_the_folder_of_the_data_is_not_the_runs_own(tmp_path: Path, own: str, path: str, told: str) -> None:
    recipe_path = write_one_step(tmp_path, words=10)
    (tmp_path / "link").symlink_to(".")
    for key in ("data.path", "data.eval_path"):
        overrides = [own.format(tmp_path), f"{key}={path.format(tmp_path)}"]
        with pytest.raises(RecipeError, match=rf"{told} = .*: is where {key} = .* looks for data; give it a folder"):
            load_recipe(recipe_path, overrides)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.txt", "link", "recipe.toml"]
