"""What the README shows is what the code takes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from pipeline.recipe import load_recipe

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_the_recipe_in_it_is_a_whole_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.toml").write_text(text)
    assert load_recipe(tmp_path / "mine.toml").train.sequence_length == 4096


def test_every_command_and_file_that_it_names_exists() -> None:
    modules = set(re.findall(r"python -m ((?:tasks|cluster)\.\w+)", README))
    assert {"tasks.train", "tasks.plan", "tasks.export_hf", "cluster.head"} <= modules
    for module in modules:
        package = importlib.import_module(module)
        entry = importlib.import_module(f"{module}.__main__") if hasattr(package, "__path__") else package
        assert callable(entry.main), module
    root = Path(__file__).resolve().parents[2]
    missing = [path for path in re.findall(r"\]\((?!http)([\w./-]+)\)", README) if not (root / path).exists()]
    assert not missing
