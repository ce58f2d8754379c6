from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe import Recipe, RecipeError, differences, load_recipe, parse_recipe, recipe_toml
from tiers.layout import ElementType, Precision

MINIMAL = """
[model]
source = "model"
[data]
path = "data/*.jsonl"
[train]
steps = 10
sequence_length = 128
sequences_per_step = 8
"""


def write(folder: Path, text: str = MINIMAL, name: str = "tiny.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_minimal_recipe_takes_documented_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ())
    assert recipe.run.name == "tiny"
    assert recipe.run.dir == Path.home() / "megatrain" / "tiny"
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.train.micro_batch == "auto"
    assert recipe.with_micro_batch(4).train.micro_batches == 2
    assert recipe.precision.precision is Precision.BF16
    assert recipe.precision.gradient_type is ElementType.BFLOAT16


def test_paths_of_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    text = MINIMAL + '[memory]\nnvme_dir = "~/scratch"\n[run]\ndir = "../out"\nresume = "old/checkpoints/step-000003"\n'
    (tmp_path / "recipes").mkdir()
    recipe = load_recipe(write(tmp_path / "recipes", text), ())
    assert recipe.model.source == tmp_path / "recipes/model"
    assert recipe.data.path == (tmp_path / "recipes/data/*.jsonl",)
    assert recipe.run.dir == tmp_path / "out"
    assert recipe.run.resume == tmp_path / "recipes/old/checkpoints/step-000003"
    assert recipe.memory.nvme_dir == Path.home() / "scratch"
    assert recipe.data.tokenizer == "bytes"


def test_paths_of_an_override_are_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    path = write(tmp_path)
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(path, ["run.dir=out", 'data.path=["a.txt", "/b.txt"]', "run.resume=never"])
    assert recipe.run.dir == tmp_path / "here/out"
    assert recipe.data.path == (tmp_path / "here/a.txt", Path("/b.txt"))
    assert recipe.run.resume == "never"


def test_override_values_are_toml_and_bare_words_are_text(tmp_path: Path) -> None:
    overrides = [
        "optimizer.lr=1e-5",
        "optimizer.betas=[0.8, 0.9]",
        "train.compile=false",
        "run.name = 2024-01-01",
        "precision.mode=fp32",
        "model.source=",
        "model.config.model_type=llama",
        "model.config.hidden_size=64",
    ]
    recipe = load_recipe(write(tmp_path), overrides)
    assert recipe.optimizer.lr == 1e-5
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.train.compile is False
    assert recipe.run.name == "2024-01-01"
    assert recipe.model.config == {"model_type": "llama", "hidden_size": 64}
    assert recipe.precision.gradient_type is ElementType.FLOAT32


@pytest.mark.parametrize("override", ["train.steps", "steps=3", "=3", "train.=3", "train.steps.x=3"])
def test_malformed_overrides_are_named(tmp_path: Path, override: str) -> None:
    message = message_of(write(tmp_path), override)
    assert f"--set {override}" in message


@pytest.mark.parametrize(
    ("section", "line", "hint"),
    [
        ("optimizer", "learing_rate = 1e-3", "did you mean optimizer.lr?"),
        ("train", "bacth_size = 4", "did you mean train.sequences_per_step?"),
        ("train", "sequence_lenght = 4", "did you mean sequence_length?"),
        ("train", "grad_accum = 0", "did you mean train.sequences_per_step?"),
        ("train", "lr = 1e-3", "did you mean optimizer.lr?"),
        ("data.columns", 'input_id = "x"', "did you mean input_ids?"),
        ("optimzer", "lr = 1e-3", "did you mean optimizer? Sections: run, model, data, train"),
        ("precision", 'dtype = "fp32"', "did you mean precision.mode?"),
        ("zzz", "x = 1", "Sections: run, model"),
    ],
)
def test_unknown_names_get_the_nearest_valid_one(tmp_path: Path, section: str, line: str, hint: str) -> None:
    header = "" if section == "train" else f"[{section}]\n"
    message = message_of(write(tmp_path, MINIMAL + header + line))
    assert hint in message
    named = line.split(" = ")[0] if "zer" not in section or section == "optimizer" else section
    assert (section if section in ("zzz", "optimzer") else f"{section}.{named}") in message


def test_key_outside_any_section_is_sent_to_its_own(tmp_path: Path) -> None:
    message = message_of(write(tmp_path, "steps = 3\n" + MINIMAL))
    assert "steps = 3: no such section; did you mean train.steps?" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=0", "train.steps = 0: must be a whole number, at least 1"),
        ("train.steps=-1", "train.steps = -1: must be a whole number, at least 1"),
        ("train.micro_batch=1.5", "train.micro_batch = 1.5: must be a whole number, at least 1"),
        ("train.micro_batch=0", "train.micro_batch = 0: must be a whole number, at least 1"),
        ("train.steps=true", "train.steps = true: must be a whole number, at least 1"),
        ("train.steps=12a", 'train.steps = "12a": must be a whole number, at least 1'),
        ("train.compile=1", "train.compile = 1: must be true or false"),
        ('optimizer.lr="1e-5"', 'optimizer.lr = "1e-5": must be a number, above 0'),
        ("optimizer.lr=true", "optimizer.lr = true: must be a number, above 0"),
        ("optimizer.lr=nan", "optimizer.lr = NaN: must be a number, above 0"),
        ("optimizer.lr=inf", "optimizer.lr = Infinity: must be a number, above 0"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = [0.9, 1.0]: must be a list of 2 values, each a number"),
        ("optimizer.betas=0.9", "optimizer.betas = 0.9: must be a list of 2 values"),
        ("optimizer.warmup_steps=11", "optimizer.warmup_steps = 11: must not exceed train.steps = 10"),
        ("optimizer.schedule=cosin", 'or "wsd"; did you mean "cosine"?'),
        ("optimizer.schedule=wsd", "optimizer.decay_steps = 0: wsd needs at least 1"),
        ("optimizer.decay_steps=3", 'optimizer.decay_steps = 3: only schedule = "wsd" uses it'),
        ("precision.mode=fp16", 'precision.mode = "fp16": must be "bf16" or "fp32"; did you mean'),
        ("precision.mode=FP32", 'did you mean "fp32"?'),
        ("train.sequences_per_step=7", None),
        ("memory.waves=9", "memory.waves = 9: must not exceed the 8 micro-batches of a step"),
        ("memory.boundary_every=0", "memory.boundary_every = 0: must be a whole number, at least 1"),
        ("train.micro_batch=3", "train.sequences_per_step = 8: must be a multiple of train.micro_batch = 3"),
        ("model.config=config.json", "give exactly one of model.source (pretrained) and model.config"),
        ("model.source=", "give exactly one of model.source (pretrained) and model.config"),
        ('model.source=""', 'model.source = "": must be a path in quotes'),
        ("data.path=[]", "data.path = []: must be a path in quotes, or a list of such"),
        ("data.path=", "data.path: is required"),
        ("data.eval_fraction=1.0", "data.eval_fraction = 1.0: must be a number, above 0, below 1"),
        ("eval.every_steps=5", "needs held-out data"),
        ("memory.nvme_gib=5", "memory.nvme_dir says where"),
        ("run.name=a/b", 'run.name = "a/b": must be text in quotes, matching'),
        ("run.name=123", "run.name = 123: must be text in quotes"),
        ("run.accept_changes=['steps']", "run.accept_changes"),
        ("run.dir=/tmp/ray/s/runtime_resources/working_dir_files/p/out", "which Ray deletes"),
    ],
)
def test_wrong_values_are_told_with_what_is_allowed(tmp_path: Path, override: str, expected: str | None) -> None:
    path = write(tmp_path)
    if expected is None:
        assert load_recipe(path, [override]).train.sequences_per_step == 7
    else:
        assert expected in message_of(path, override)


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    text = '[train]\nsteps = "3"\nsequence_length = 128\n[data]\npth = "x"\n[optmizer]\n[log]\nevery_s = -1\n'
    message = message_of(write(tmp_path, text))
    assert "7 problems" in message
    for part in (
        "model: is required: a table with source, config",
        'train.steps = "3"',
        "train.sequences_per_step: is required",
        "data.path: is required",
        'data.pth = "x": no such key; did you mean path?',
        "optmizer = {}: no such section; did you mean optimizer?",
        "log.every_s = -1: must be a number, at least 0",
    ):
        assert part in message


def test_a_section_must_be_a_table(tmp_path: Path) -> None:
    assert "log = 3: must be a table" in message_of(write(tmp_path, "log = 3\n" + MINIMAL))
    assert "run = 3: must be a table" in message_of(write(tmp_path, "run = 3\n" + MINIMAL))


def test_whole_numbers_pass_as_floats(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path), ["memory.ram_gib=8"]).memory.ram_gib == 8.0


def test_dates_are_refused(tmp_path: Path) -> None:
    message = message_of(write(tmp_path, MINIMAL + "[run]\nname = 2024-01-01\n"))
    assert "run.name" in message
    assert "dates are not used" in message


def test_unreadable_files_are_told_apart(tmp_path: Path) -> None:
    assert "no such recipe" in message_of(tmp_path / "absent.toml")
    assert "is a directory" in message_of(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "not text in UTF-8" in message_of(tmp_path / "binary.toml")
    yaml = message_of(write(tmp_path, "train:\n  learning_rate: 1e-5\n", "recipe.yaml"))
    assert "is not TOML" in yaml
    assert "line 1, column 6" in yaml


def full(folder: Path) -> Recipe:
    overrides = [
        "model.source=",
        'model.config={model_type = "llama", rope_theta = 1e4, rope_scaling = {rope_type = "linear", factor = 2.0}}',
        "optimizer.lr=3e-4",
        'run.accept_changes=["train.steps"]',
        f"memory.nvme_dir={folder}/nvme",
        "data.eval_fraction=0.1",
        "eval.every_steps=5",
    ]
    return load_recipe(write(folder), overrides)


def test_resolved_recipe_round_trips_through_toml(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for recipe in (full(tmp_path), load_recipe(write(tmp_path), ())):
        again = load_recipe(write(tmp_path / "elsewhere", recipe_toml(recipe), "recipe.toml"), ())
        assert again == recipe
        assert differences(recipe, again) == ()
        assert parse_recipe(recipe_toml(recipe)) == recipe


def test_stored_recipe_that_does_not_parse_is_named() -> None:
    with pytest.raises(RecipeError, match=r"step-000003: is not TOML.*line 1, column 1"):
        parse_recipe("= 1", "step-000003")
    with pytest.raises(RecipeError, match="step-000003: 4 problems"):
        parse_recipe("", "step-000003")


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True), field=st.text(min_size=1))
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, name: str, field: str) -> None:
    folder = tmp_path_factory.mktemp("text")
    base = load_recipe(write(folder), ())
    recipe = base.model_copy(
        update={
            "run": base.run.model_copy(update={"name": name}),
            "data": base.data.model_copy(update={"text_field": field}),
        }
    )
    assert load_recipe(write(folder, recipe_toml(recipe)), ()) == recipe


def test_differences_name_the_key_and_what_changes_the_result(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = load_recipe(path, ())
    after = load_recipe(path, ["train.steps=20", "memory.ram_gib=8", "run.seed=1", "train.device=cpu"])
    found = {difference.key: difference for difference in differences(before, after)}
    assert set(found) == {"train.steps", "memory.ram_gib", "run.seed", "train.device"}
    assert str(found["train.steps"]) == "train.steps: 10 -> 20"
    assert str(found["memory.ram_gib"]) == "memory.ram_gib: not set -> 8.0"
    assert {key for key, difference in found.items() if difference.changes_result} == {"train.steps", "run.seed"}


def test_differences_see_past_what_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path)
    long = "x" * 100
    before = load_recipe(path, [f"data.text_field={long}a"])
    (difference,) = differences(before, load_recipe(path, [f"data.text_field={long}b"]))
    assert difference.before.endswith('xxa"') and difference.after.endswith('xxb"')


def test_recipe_is_frozen_and_its_keys_are_documented(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path), ())
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        assert section is not None
        undocumented = [key for key, inner in section.model_fields.items() if not inner.description]
        assert not undocumented, name


def test_learning_rate_follows_the_recipe(tmp_path: Path) -> None:
    rate = load_recipe(write(tmp_path), ["optimizer.lr=1e-3", "optimizer.warmup_steps=5"]).learning_rate()
    assert rate.at(1) == pytest.approx(2e-4)
    assert rate.at(6) == 1e-3


def test_recipe_and_its_error_cross_process_borders(tmp_path: Path) -> None:
    recipe = full(tmp_path)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    error = pickle.loads(pickle.dumps(RecipeError("all of it")))
    assert str(error) == "all of it"


@pytest.mark.parametrize(
    "key", ["memory.ram_gib", "memory.gpu_gib", "memory.nvme_gib", "checkpoint.staging_gib", "memory.kept_layers"]
)
def test_sizes_beyond_every_machine_are_refused(tmp_path: Path, key: str) -> None:
    path = write(tmp_path)
    for value in ("1e308", "1e999", "9" * 400):
        assert f"{key} = " in message_of(path, f"memory.nvme_dir={tmp_path}", f"{key}={value}")
    assert f"{key}: is a number of more than" in message_of(path, f"{key}=0x{'f' * 5000}")
    assert "at most " in message_of(path, f"{key}={2**20 if 'layers' in key else ''}000000")


def test_every_number_of_a_recipe_has_a_bound_that_sizes_can_be_computed_with(tmp_path: Path) -> None:
    huge = "9" * 400
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        assert section is not None
        for key, inner in section.model_fields.items():
            if "int" in str(inner.annotation):
                assert f"{name}.{key} = {huge[:80]}" in message_of(write(tmp_path), f"{name}.{key}={huge}"), key


@pytest.mark.parametrize("where", ["folder", "override", "key", "home"])
def test_names_that_are_no_text_are_refused(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's name may be any bytes; a recipe is text."""
    folder = tmp_path / os.fsdecode(b"d\xfc")
    folder.mkdir()
    if where == "home":
        monkeypatch.setenv("HOME", str(folder))
        path, override, told = write(tmp_path), "log.every_s=1", "run.dir"
    else:
        path = write(folder if where == "folder" else tmp_path)
        override, told = {
            "folder": ("log.every_s=1", "model.source"),
            "override": (f"data.path={folder}", "data.path"),
            "key": (f"data.{folder.name}=1", r"data.d\udcfc"),
        }[where]
    message = message_of(path, override)
    message.replace(str(path), "").encode()
    assert told in message and "UTF-8" in message and r"d\udcfc" in message


def test_what_has_no_end_is_no_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, "# " + "x" * 1_000_000 + MINIMAL)
    assert "is no recipe: it has more than 1,000,000 characters" in message_of(path)
