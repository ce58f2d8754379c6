"""Where a run goes on after a loss, and what its user is told: never a checkpoint that another run left beside it."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from pipeline.recipe import parse_recipe
from pipeline.recipe.sections import RunSection
from support.stores import saved_facts, small_model
from tasks.recovery import last_saved, make_way, way_on
from tasks.resume import ResumePoint
from tiers.errors import CheckpointError
from tiers.layout import Precision
from tiers.manifest import Manifest, write_manifest

MODEL = small_model(Precision.BF16, rows=8)


def run_of(tmp_path: Path, resume: Path | str = "auto") -> RunSection:
    text = f"""
    run = {{ name = "r", dir = "{tmp_path}/run", resume = "{resume}" }}
    model.config = {{ model_type = "llama" }}
    data.path = "{tmp_path}/data.parquet"
    train = {{ steps = 9, sequence_length = 4, sequences_per_step = 1 }}
    """
    return parse_recipe(text, "recipe").run


def save(run_dir: Path, step: int, *, whole: bool = True) -> Path:
    checkpoint = run_dir / "checkpoints" / f"step-{step:06}"
    checkpoint.mkdir(parents=True)
    if whole:
        now = datetime.datetime.now(datetime.UTC)
        write_manifest(checkpoint, Manifest(created=now, facts=saved_facts(MODEL, step), files=()))
    return checkpoint


def test_a_run_that_started_from_elsewhere_goes_back_there_until_it_has_saved(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "other", 4)
    run, start, said = run_of(tmp_path, elsewhere), ResumePoint.of(elsewhere), list[str]()
    for step in (2, 4, 8):
        save(run.dir, step)
    assert way_on(run, start, has_begun=False) == f"the same command goes on from {elsewhere}", "8 is another run's"
    make_way(run, start, said.append)
    assert len(said) == 1 and "step-000008.aside-0" in said[0]
    assert last_saved(run, start, said.append) == start
    assert way_on(run, start, has_begun=True) == f"the same command goes on from {elsewhere}"
    own = save(run.dir, 6)
    assert last_saved(run, start, said.append) == ResumePoint.of(own)
    assert way_on(run, start, has_begun=True) == f'the same command with run.resume = "auto" goes on from {own}'


def test_a_run_that_started_from_elsewhere_has_no_use_for_what_is_damaged(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "other", 4)
    run, start = run_of(tmp_path, elsewhere), ResumePoint.of(elsewhere)
    save(run.dir, 2, whole=False)
    assert last_saved(run, start, print) == start


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    run, said = run_of(tmp_path), list[str]()
    assert last_saved(run, None, said.append) is None
    assert way_on(run, None, has_begun=True).startswith("the same command goes on from the beginning")
    older, newer = save(run.dir, 2), save(run.dir, 4)
    make_way(run, ResumePoint.of(newer), said.append)
    assert last_saved(run, ResumePoint.of(newer), said.append) == ResumePoint.of(newer)
    assert way_on(run, None, has_begun=True) == f"the same command goes on from {newer}"
    assert not said
    (newer / "manifest.json").unlink()
    assert last_saved(run, None, said.append) == ResumePoint.of(older)
    assert len(said) == 1 and said[0].startswith("passed over step-000004")
    (older / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000004: .*; step-000002: "):
        last_saved(run, None, said.append)


def test_a_run_that_starts_anew_sets_aside_what_is_left_of_checkpoints(tmp_path: Path) -> None:
    run, said = run_of(tmp_path, "never"), list[str]()
    damaged = save(run.dir, 2, whole=False)
    make_way(run, None, said.append)
    assert len(said) == 1 and not damaged.exists()
    assert last_saved(run, None, said.append) is None
    own = save(run.dir, 1)
    assert way_on(run, None, has_begun=True) == f'the same command with run.resume = "auto" goes on from {own}'
