"""The run that every fault is held against: one recipe, trained once without any fault."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.kills import RECIPE, rows, running


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    words = random.Random(0)
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number:02}.txt").write_text(" ".join(words.choice(["alpha", "beta", "gamma"]) for _ in range(300)))
    (folder / "nvme").mkdir()
    path = folder / "recipe.toml"
    path.write_text(RECIPE.replace("[memory]", f'[memory]\nnvme_dir = "{folder / "nvme"}"'))
    return path


@pytest.fixture(scope="session")
def undisturbed(recipe: Path) -> Path:
    run_dir = recipe.parent / "undisturbed"
    with running(recipe, run_dir) as run:
        assert run.finish() == 0, run.output()
    operations = {str(row["name"]).split("[")[0] for row in rows(run_dir, "events.jsonl")}
    assert {"load_state", "store_state", "snapshot"} <= operations, "lower ram_gib: the placement keeps all in RAM"
    return run_dir
