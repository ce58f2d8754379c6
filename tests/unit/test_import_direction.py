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
