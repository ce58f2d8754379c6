from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.prediction.hardware import Device, load_hardware
from tasks.probe import main

SECONDS = ("--seconds", "0.02")


def test_writes_a_hardware_file_that_a_plan_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, drive = tmp_path / "machine.toml", tmp_path / "drive"
    out.symlink_to("measured.toml")
    drive.mkdir()
    assert main(["--out", str(out), "--nvme-dir", str(drive), *SECONDS]) == 0
    hardware = load_hardware(out)
    assert hardware.nvme is not None and hardware.nvme.read_gbps > 0
    assert hardware.device.product_tail >= 0 and hardware.device.gemm_tflops > 0
    assert 0 < hardware.device.attention_efficiency != Device.attention_efficiency, "measured, not assumed"
    assert hardware.host.cores > 0 and hardware.host.update_gparams_per_s > 0
    assert list(drive.iterdir()) == [] and out.is_symlink()
    assert "updating with AdamW" in capsys.readouterr().err


def test_refuses_a_missing_drive_before_it_measures_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FAULTS B86."""
    assert main(["--nvme-dir", str(tmp_path / "none"), *SECONDS]) == 2
    error = capsys.readouterr().err
    assert "does not exist" in error and "copying" not in error


def test_refuses_an_output_whose_directory_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "none" / "machine.toml"), *SECONDS]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), *SECONDS]) == 2
    assert "is a directory" in capsys.readouterr().err
