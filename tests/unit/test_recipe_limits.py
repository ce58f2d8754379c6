"""Numbers that no machine or model has a use for are refused with their limit; what only may surprise is noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.recipe import RecipeError, load_recipe
from pipeline.recipe_limits import beyond_positions, check_threads, checkpoint_at_the_end
from support.small_recipe import write_one_step
from tasks import plan, train


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_one_step(tmp_path, words=500)


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("memory.optimizer_actors", 100_000, 64),
        ("memory.threads_per_actor", 100_000, 256),
        ("memory.prefetch_threads", 100_000, 256),
        ("memory.waves", 65, 64),
        ("train.steps", 10**30, 10**9),
        ("train.sequences_per_step", 10**12, 2**20),
        ("train.sequence_length", 10**12, 2**24),
        ("checkpoint.keep_last", 10**30, 10**9),
    ],
)
def test_an_absurd_number_is_refused_with_its_limit(path: Path, key: str, value: int, most: int) -> None:
    with pytest.raises(RecipeError, match=rf"{key} = {value}: must be a whole number, .*at most {most}"):
        load_recipe(path, (f"{key}={value}",))


@pytest.mark.parametrize(("actors", "threads", "cores"), [(64, 256, 16), (64, 2, 2), (1, 65, 1)])
def test_more_threads_than_cores_have_a_use_for_are_refused(path: Path, actors: int, threads: int, cores: int) -> None:
    recipe = load_recipe(path, (f"memory.optimizer_actors={actors}", f"memory.threads_per_actor={threads}"))
    with pytest.raises(RecipeError, match=rf"makes {actors * threads} optimizer threads, on {cores} cores at most 64"):
        check_threads(recipe, actors * threads, cores)
    check_threads(recipe, 64, cores)


@pytest.mark.parametrize("command", [plan, train], ids=["plan", "train"])
@pytest.mark.parametrize("settings", [("boundary_every=5",), ("optimizer_actors=64", "threads_per_actor=256")])
def test_commands_refuse_them_in_one_message(
    command: object, settings: tuple[str, ...], path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [argument for setting in settings for argument in ("--set", f"memory.{setting}")]
    assert command.main((str(path), *overrides)) == 2  # type: ignore[attr-defined]
    error = capsys.readouterr().err
    assert ": refused: the recipe of recipe: memory." in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_sequences_longer_than_the_model_was_made_for_are_noted_and_planned(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: train.sequence_length = 129 is above the model's max_position_embeddings = 128"
    assert plan.main((str(path),)) == 0 and "max_position" not in capsys.readouterr().out
    assert plan.main((str(path), "--set", "train.sequence_length=129")) == 0
    assert note in capsys.readouterr().out
    assert train.main((str(path), "--dry-run", "--set", "train.sequence_length=129")) == 0
    assert note in capsys.readouterr().out


def test_a_scaled_rotary_embedding_reaches_further(path: Path) -> None:
    recipe = load_recipe(path, ("train.sequence_length=512",))
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    for key in ("rope_scaling", "rope_parameters"):
        config = {"max_position_embeddings": 128, key: scaling}
        assert beyond_positions(recipe, config) is None
        assert beyond_positions(recipe, config | {key: scaling | {"factor": 2.0}}) is not None
    assert beyond_positions(recipe, {}) is None


def test_a_run_that_saves_nothing_on_its_way_is_told_so(path: Path) -> None:
    steps = ["train.steps=20"]
    note = checkpoint_at_the_end(load_recipe(path, steps))
    assert note is not None and "step, 20," in note and "set checkpoint.every_steps" in note
    assert checkpoint_at_the_end(load_recipe(path, [*steps, "checkpoint.every_steps=20"])) == note
    assert checkpoint_at_the_end(load_recipe(path, [*steps, "checkpoint.every_steps=19"])) is None
