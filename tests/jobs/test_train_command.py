"""`python -m tasks.train` from a user's side: what it leaves, how it goes on, what it refuses and in what words."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.command_line import FAILED, REFUSED
from pipeline.messages import IGNORED
from pipeline.recipe import load_recipe
from support.kills import REPOSITORY, assert_same_state, rows, running
from support.small_recipe import SMALL_MODEL
from support.tiny import tiny_config
from tasks import export_hf, train
from tasks.data.loader import eval_batches
from tasks.preparation import open_data, prepare
from tiers.manifest import read_manifest

STEPS = 60

RECIPE = f"""{SMALL_MODEL}[data]
path = "text"
eval_fraction = 0.2
[train]
steps = {STEPS}
sequence_length = 64
sequences_per_step = 4
micro_batch = 2
device = "cpu"
[optimizer]
lr = 1e-3
[memory]
optimizer_actors = 2
[eval]
every_steps = 20
"""

Command = Callable[..., int]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory: a recipe and some pages of words."""
    place = tmp_path_factory.mktemp("user")
    (place / "recipe.toml").write_text(RECIPE)
    (place / "text").mkdir()
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(40)]
    for page in range(20):
        (place / "text" / f"{page}.txt").write_text(" ".join(rng.choices(words, k=30)))
    return place


@pytest.fixture
def command(place: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command in this process: for what ends before Ray is started."""
    monkeypatch.chdir(place)

    def run(*overrides: str, recipe: str = "recipe.toml", options: tuple[str, ...] = ()) -> int:
        return train.main([recipe, *options, *(part for override in overrides for part in ("--set", override))])

    return run


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """An undisturbed run with everything in RAM."""
    run_dir = place / "runs" / "undisturbed"
    run_dir.parent.mkdir()
    with running(place / "recipe.toml", run_dir) as run:
        run.wait_for(lambda: run.said("^trained "), "the last step")
        run.process.send_signal(signal.SIGTERM)  # too late to change anything
        assert run.finish() == train.TRAINED, run.output()
    return run_dir


@pytest.mark.ray
def test_a_run_leaves_its_recipe_rows_checkpoint_and_says_what_it_read(trained: Path) -> None:
    said = trained.with_suffix(".log").read_text()
    found = rows(trained)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert not any(row["skipped"] for row in found)
    assert sum(float(str(row["loss"])) for row in found[-5:]) / 5 < 0.8 * float(str(found[0]["loss"]))
    assert {"recipe.toml", "metrics.jsonl", "evaluation.jsonl", "events.jsonl"} <= {p.name for p in trained.iterdir()}
    assert load_recipe(trained / "recipe.toml").train.steps == STEPS
    assert [path.name for path in (trained / "checkpoints").iterdir()] == [f"step-{STEPS:06}"]
    position = read_manifest(trained / "checkpoints" / f"step-{STEPS:06}").facts.data_position
    assert position.epoch >= 2, "the run was to pass the end of an epoch"
    assert "20 rows" in said and "213" in said and f"trained {STEPS} steps" in said, said


@pytest.mark.ray
def test_a_run_that_is_over_says_so_without_a_cluster(
    trained: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    files = {path: path.stat().st_mtime_ns for path in trained.rglob("*") if path.name != "run.lock"}
    assert command(f"run.dir={trained}") == train.TRAINED
    assert f"trained {STEPS} steps; export with" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == changed for path, changed in files.items())
    # Longer, there is something left to do.
    longer = f"train.steps={STEPS + 1}", 'run.accept_changes=["train.steps"]'
    assert command(f"run.dir={trained}", *longer) != train.TRAINED
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.ray
def test_the_exported_model_has_the_loss_that_the_run_reported(trained: Path, tmp_path: Path) -> None:
    assert export_hf.main([str(trained), str(tmp_path / "model")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    assert model.dtype == torch.bfloat16
    recipe = load_recipe(trained / "recipe.toml")
    held_out = open_data(recipe, prepare(recipe).spec, lambda line: None).held_out
    assert held_out is not None
    total, tokens = 0.0, 0
    for batch in eval_batches(held_out, 2, 2):
        for ids, targets, positions in zip(batch.input_ids, batch.targets, batch.position_ids, strict=True):
            # transformers sees the documents of a packed row by their positions.
            for row in range(ids.shape[0]):
                arrays = (torch.from_numpy(array[row : row + 1]).long() for array in (ids, targets, positions))
                input_ids, target_ids, position_ids = arrays
                with torch.no_grad():
                    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
                total += float(
                    torch.nn.functional.cross_entropy(
                        logits[0].float(), target_ids[0], ignore_index=IGNORED, reduction="sum"
                    )
                )
        tokens += batch.supervised_tokens
    last = rows(trained, "evaluation.jsonl")[-1]
    assert (last["step"], last["supervised_tokens"]) == (STEPS, tokens)
    assert total / tokens == pytest.approx(last["loss"], abs=1e-3)


@pytest.mark.ray
def test_interrupted_and_resumed_in_another_placement_equals_uninterrupted(
    trained: Path, place: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """B62, B110, B116, B122: stopped in the middle of an epoch, resumed with state and weights on NVMe.

    Ctrl+C in a terminal reaches Ray's processes too.
    """
    run_dir, nvme = trained.with_name("interrupted"), place / "nvme"
    nvme.mkdir()
    with running(place / "recipe.toml", run_dir) as run:
        run.wait_for(lambda: run.step() >= 3, "step 3")
        run.process.send_signal(signal.SIGSTOP)  # it holds its directory and gets no further
        assert command(f"run.dir={run_dir}") == REFUSED
        assert "in use" in (refusal := capsys.readouterr().err) and str(run.process.pid) in refusal
        os.killpg(run.process.pid, signal.SIGINT)
        run.process.send_signal(signal.SIGCONT)
        assert run.finish() == train.STOPPED, run.output()
        assert run.said("^SIGINT: finishing the step and saving") == 1 and "Traceback" not in run.output()
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    facts = read_manifest(checkpoint).facts
    assert 3 <= facts.step < STEPS and facts.applied_steps == facts.step
    assert len(rows(run_dir)) == facts.step

    changed = (f"run.dir={run_dir}", "optimizer.lr=2e-3", "train.sequence_length=32")
    assert command(*changed) == REFUSED
    refusal = capsys.readouterr().err
    for part in ("optimizer.lr", "0.001", "0.002", "train.sequence_length", "64", "32", "run.accept_changes"):
        assert part in refusal, refusal
    accepted = 'run.accept_changes=["optimizer.lr", "train.sequence_length"]'
    assert command(*changed, accepted, options=("--dry-run",)) == train.TRAINED
    assert f"(step {facts.step})" in capsys.readouterr().out

    page = place / "text" / "3.txt"
    text = page.read_text()
    page.write_text(text[::-1])
    assert command(f"run.dir={run_dir}") == REFUSED
    assert "other documents" in (refusal := capsys.readouterr().err) and '["data.path"]' in refusal
    assert command(f"run.dir={run_dir}", 'run.accept_changes=["data.path"]', options=("--dry-run",)) == train.TRAINED
    page.write_text(text)

    small = ("memory.ram_gib=0.0018", f"memory.nvme_dir={nvme}", "memory.optimizer_actors=1", "train.micro_batch=auto")
    with running(place / "recipe.toml", run_dir, *small) as run:
        assert run.finish() == train.TRAINED, run.output()
    resumed = rows(run_dir)
    assert [row["step"] for row in resumed] == list(range(1, STEPS + 1))
    assert all(int(str(row["nvme_write_bytes"])) > 0 for row in resumed[facts.step + 2 :])
    assert [path.suffix for path in nvme.iterdir()] == [".lock"], "working files were left on the drive"
    assert_same_state(run_dir / "checkpoints" / f"step-{STEPS:06}", trained / "checkpoints" / f"step-{STEPS:06}")
    for name, fields in (("metrics.jsonl", ("loss", "grad_norm", "lr")), ("evaluation.jsonl", ("step", "loss"))):
        got, wanted = rows(run_dir, name), rows(trained, name)
        assert [[row[f] for f in fields] for row in got] == [[row[f] for f in fields] for row in wanted], name


@pytest.mark.ray
def test_steps_without_supervised_tokens_change_nothing_and_are_counted(place: Path) -> None:
    """B17, B18; and a checkpoint after every step is published after every step, though nobody reads what it says."""
    ids = [[(7 * row + position) % 300 for position in range(64)] for row in range(20)]
    labels = [[IGNORED] * 64 if row // 4 in (2, 4) else row_ids for row, row_ids in enumerate(ids)]
    pq.write_table(pa.table({"input_ids": ids, "labels": labels}), place / "labelled.parquet")
    run_dir = place / "empty-steps"
    options = ("data.shuffle=false", f"data.path={place}/labelled.parquet", "train.steps=5", "checkpoint.every_steps=1")
    without = ("eval.every_steps=0", "checkpoint.keep_last=9")
    recipe = place / "labelled.toml"
    recipe.write_text(RECIPE.replace("eval_fraction = 0.2\n", ""))
    with running(recipe, run_dir, *options, *without, unread=True) as run:
        assert run.finish() == train.TRAINED, run.output()
    found = rows(run_dir)
    assert [row["skipped"] for row in found] == [False, False, True, False, True]
    assert [row["supervised_tokens"] for row in found] == [252, 252, 0, 252, 0]
    assert [row["loss"] is None for row in found] == [False, False, True, False, True]
    assert [row["applied_steps"] for row in found] == [1, 2, 2, 3, 3]
    rate = load_recipe(run_dir / "recipe.toml").learning_rate()
    assert [row["lr"] for row in found] == [rate.at(step) for step in (1, 2, 3, 3, 4)]
    checkpoints = run_dir / "checkpoints"
    assert sorted(path.name[-1] for path in checkpoints.iterdir()) == ["1", "2", "3", "4", "5"]
    assert_same_state(checkpoints / "step-000003", checkpoints / "step-000002")
    assert_same_state(checkpoints / "step-000005", checkpoints / "step-000004")
    facts = read_manifest(checkpoints / "step-000005").facts
    assert (facts.applied_steps, facts.skipped_steps) == (3, 2)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_state(checkpoints / "step-000002", checkpoints / "step-000001")


@pytest.fixture(scope="module")
def model_dir(place: Path) -> Path:
    """A Hugging Face directory."""
    fields = tiny_config("llama", vocab_size=320, max_position_embeddings=128)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(place / "model")
    return place / "model"


@pytest.mark.ray
def test_a_loss_that_is_never_finite_ends_the_run_and_is_never_a_number(place: Path, model_dir: Path) -> None:
    """B19, B45, B53."""
    broken = place / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    weights = load_file(model_dir / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    recipe = place / "broken.toml"
    recipe.write_text(with_source(broken))
    run_dir = place / "not-finite"
    with running(recipe, run_dir, "train.max_skipped_in_a_row=2", "eval.every_steps=0") as run:
        assert run.finish() == FAILED, run.output()
    assert "step 3: the loss is not finite, as in the 2 steps before it" in run.output(), run.output()
    assert "Traceback" not in run.output()
    found = rows(run_dir)
    assert [(row["loss"], row["skipped"], row["applied_steps"]) for row in found] == [(None, True, 0)] * 3


def with_source(source: Path) -> str:
    """The recipe for pretrained weights."""
    start, end = RECIPE.index("[model.config]"), RECIPE.index("[data]")
    return f'{RECIPE[:start]}[model]\nsource = "{source}"\n{RECIPE[end:]}'


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.stpes=3"], ["train.stpes", "did you mean steps"]),
        (["train.steps=0"], ["train.steps"]),
        (["train.sequences_per_step=3"], ["train.sequences_per_step", "multiple"]),
        (["data.path=nowhere"], ["nowhere"]),
        (["model.config.vocab_size=200"], ["200", "257"]),
        (["model.config.model_type=gpt9"], ["gpt9", "llama"]),
        (["model.config.rope_scaling_extra=1"], ["rope_scaling_extra"]),
        (["memory.ram_gib=0.0001"], ["memory.ram_gib"]),
        (["memory.nvme_dir=nodrive"], ["memory.nvme_dir", "nodrive"]),
        (["memory.nvme_dir=text/0.txt"], ["memory.nvme_dir", "text/0.txt"]),
        (["train.device=cuda"], ["cuda"]),
        (["run.resume=checkpoints/step-000007"], ["checkpoints/step-000007"]),
        (["run.dir=text/0.txt/run"], ["text/0.txt"]),
        (["run.dir=text/0.txt"], ["text/0.txt"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(
    command: Command, place: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: list[str]
) -> None:
    before = sorted(path for path in place.rglob("*") if path.is_file())
    assert command("run.dir=refused/deep/run", *overrides) == REFUSED
    message = capsys.readouterr().err
    assert message.startswith("train: refused: ") and "Traceback" not in message
    assert all(part in message for part in said), message
    assert not (place / "refused").exists()
    assert sorted(path for path in place.rglob("*") if path.is_file()) == before


def test_data_without_a_target_is_refused_and_leaves_a_directory_as_it_was(
    command: Command, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, label in (("ignored", IGNORED), ("labelled", 5)):
        columns = {"input_ids": [[7] * 20] * 8, "labels": [[label] * 20] * 8}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    (tmp_path / "short").mkdir()
    for letter in "abc":
        (tmp_path / "short" / f"{letter}.txt").write_text(letter)
    (place / "no-split.toml").write_text(RECIPE.replace("eval_fraction = 0.2\n", "").replace("every_steps = 20\n", ""))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "notes").touch()
    for options, said in (
        ((f"data.path={tmp_path}/ignored.parquet",), "none of the 160 tokens to train on"),
        ((f"data.path={tmp_path}/short", "data.append_eos=false"), "none of the 3 tokens to train on"),
        ((f"data.eval_path={tmp_path}/ignored.parquet",), "none of the 160 tokens held out"),
    ):
        assert command(f"run.dir={run_dir}", *options, recipe="no-split.toml") == REFUSED
        message = capsys.readouterr().err
        assert said in message and options[0].replace("=", " = ") in message and "-100" in message, message
    accepted = f"data.path={tmp_path}/labelled.parquet"
    assert command(f"run.dir={run_dir}", accepted, recipe="no-split.toml", options=("--dry-run",)) == train.TRAINED
    assert [path.name for path in run_dir.iterdir()] == ["notes"]


def test_a_cluster_that_cannot_be_had_is_a_refusal_too_and_leaves_nothing(
    command: Command,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """It shows only when all the rest has been vetted."""
    too_deep = tmp_path / ("deep" * 25)
    too_deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(too_deep))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert command("run.dir=refused/deep/run") == REFUSED
    message = capsys.readouterr().err
    assert message.startswith("train: refused: ") and str(too_deep) in message
    assert not (place / "refused").exists()


def test_a_bad_model_directory_is_refused(
    command: Command, place: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(name: str, damage: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
        directory = place / name
        directory.mkdir(exist_ok=True)
        config = json.loads((model_dir / "config.json").read_text())
        weights = load_file(model_dir / "model.safetensors")
        damage(config, weights)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return directory

    cases = {
        damaged("lacks", lambda config, weights: weights.pop("model.norm.weight")): "model.norm.weight",  # type: ignore[arg-type,return-value]
        damaged("wider", lambda config, weights: config.update(intermediate_size=72)): "72",
        damaged("alien", lambda config, weights: config.update(model_type="gpt9")): "gpt9",
        place / "nodir": "nodir",
        place / "text": "config.json",
    }
    for source, said in cases.items():
        (place / "source.toml").write_text(with_source(source))
        assert command("run.dir=refused", recipe="source.toml") == REFUSED
        message = capsys.readouterr().err
        assert message.startswith("train: refused: ") and said in message, message
    assert not (place / "refused").exists()


def test_a_refusal_is_one_message_on_standard_error_and_status_2(place: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tasks.train",
            place / "recipe.toml",
            "--set",
            "data.path=nowhere",
            "--set",
            "run.dir=r",
        ],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == REFUSED
    assert ended.stderr.startswith("train: refused: ") and ended.stderr.count("\n") == 1 and "nowhere" in ended.stderr
    assert not (place / "r").exists()
