"""The folders import in one direction, and the packages under test are this checkout's."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

ALLOWED = {
    "tiers": {"tiers"},
    "cluster": {"cluster"},
    "pipeline": {"pipeline", "tiers"},
    "tasks": {"tasks", "pipeline", "tiers", "cluster"},
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every absolute import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; imports are absolute here"
            yield node.lineno, (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    files = sorted((REPOSITORY / package).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line} imports {name}"
        for path in files
        for line, name in imports(path)
        if name in ALLOWED | {"tests": set()} and name not in ALLOWED[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ALLOWED)
def test_the_packages_are_this_checkouts_and_not_namesakes(package: str) -> None:
    origin = importlib.import_module(package).__file__
    assert origin is not None and Path(origin).resolve().is_relative_to(REPOSITORY)


@pytest.mark.parametrize("package", ALLOWED)
def test_no_folder_of_tests_is_named_after_a_package(package: str) -> None:
    assert not (REPOSITORY / "tests" / package).exists()


PARTS_OF_THE_PIPELINE = {
    "recipe": {"updates"},
    "step": set(),
    "updates": set(),
    "families": set(),
    "memory": {"step"},
    "prediction": {"memory", "step"},
    "compute": {"families", "memory", "step", "updates"},
}
"""Folder -> folders that it may import from. What lies beside them runs the whole and may import any."""


@pytest.mark.parametrize("part", PARTS_OF_THE_PIPELINE)
def test_a_part_of_the_pipeline_imports_only_parts_below_it(part: str) -> None:
    folder = REPOSITORY / "pipeline" / part
    imported = {
        name.split(".")[1]
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.ImportFrom) and (name := node.module or "").startswith("pipeline.")
    }
    assert imported & set(PARTS_OF_THE_PIPELINE) <= PARTS_OF_THE_PIPELINE[part] | {part}


def test_every_folder_of_the_pipeline_has_its_place_in_the_order() -> None:
    folders = {path.parent.name for path in (REPOSITORY / "pipeline").glob("*/__init__.py")}
    assert folders == set(PARTS_OF_THE_PIPELINE)
