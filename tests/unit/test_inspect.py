"""What `tasks.inspect` says of a directory, and that verification finds whatever is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks import inspect
from tasks.hf_directory import ExportSettings, export
from tasks.stored_model import StoredModel
from tests.support.saved_runs import save_run
from tests.support.tiny import tiny_config
from tiers.layout import Precision


def test_inspect_tells_run_checkpoint_and_hugging_face_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    weights = save_run(run, tiny_config("llama"), Precision.BF16)
    losses = ("5.5", "null", "2.25", "null")
    rows = "".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses, start=1))
    (run / "metrics.jsonl").write_text(rows + '{"step": 5, "lo')
    assert inspect.main([str(run), "--tensors", "--verify"]) == 0
    text = capsys.readouterr().out
    numel = sum(values.numel() for values in weights.values())
    assert "checkpoints  step-" in text
    for part in (
        "7 (7 applied",
        f"{numel:,}, bf16",
        "4 steps, loss 5.5000 -> 2.2500",
        "unreadable   1 lines",
        "exp_avg_sq",
        "lm_head.weight",
        "verified",
    ):
        assert part in text, part
    out = export(StoredModel.open(run), tmp_path / "out", ExportSettings()).directory
    assert inspect.main([str(out)]) == 0
    assert f"{numel:,} (BF16 {numel:,})" in capsys.readouterr().out
    assert inspect.main([str(tmp_path)]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def _flip(path: Path) -> None:
    """Change a byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink], ids=["flipped", "cut", "gone"])
@pytest.mark.parametrize(
    "file",
    [
        "manifest.json",
        "zarr.json",
        "layer-0001/zarr.json",
        "layer-0001/weight/zarr.json",
        "layer-0001/weight/c/0",
    ],
)
@pytest.mark.parametrize("of_run", [True, False], ids=["run", "checkpoint"])
def test_verification_ends_with_1_whatever_file_is_damaged(
    of_run: bool, file: str, damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_run(run, tiny_config("llama"), Precision.BF16)
    checkpoint_dir = StoredModel.open(run).directory
    damage(checkpoint_dir / file)
    assert inspect.main([str(run if of_run else checkpoint_dir), "--verify"]) == 1
    said = capsys.readouterr()
    assert "damaged  " in said.out and not said.err
    assert file.split("/")[-1] in said.out or "manifest" in said.out


def test_what_a_dead_writer_left_is_no_damage(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_run(run, tiny_config("llama"), Precision.BF16)
    (run / "checkpoints" / "step-000009.partial").mkdir()
    assert inspect.main([str(run), "--verify"]) == 0


def test_a_truncated_file_of_a_hugging_face_directory_is_damage_and_a_whole_one_has_no_checksums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", tiny_config("llama"), Precision.BF16)
    out = export(StoredModel.open(tmp_path / "run"), tmp_path / "out", ExportSettings()).directory
    assert inspect.main([str(out), "--verify"]) == 0
    assert "there are no checksums" in capsys.readouterr().out
    whole = next(out.glob("*.safetensors"))
    index = {"weight_map": {"a": "gone.safetensors"}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    whole.rename(out / "model-00001-of-00002.safetensors")
    assert inspect.main([str(out), "--verify"]) == 1
    assert "gone.safetensors" in capsys.readouterr().out
    _cut(out / "model-00001-of-00002.safetensors")
    assert inspect.main([str(out), "--verify"]) == 1
    assert "is truncated" in capsys.readouterr().out
