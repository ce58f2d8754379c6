"""Every command refuses what it does not know in one line and with status 2, and tells in its help what it is for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from cluster.command_line import count, count_to, not_negative, port, positive

COMMANDS = (
    "tasks.train",
    "tasks.plan",
    "tasks.probe",
    "tasks.import_hf",
    "tasks.export_hf",
    "tasks.inspect",
    "tasks.report",
    "tasks.bench",
    "tasks.demo",
    "cluster.head",
    "cluster.submit",
    "cluster.timeline",
)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{name}.__main__" if name == "tasks.bench" else name)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_argument_is_refused_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = _module(name).main
    # `x`: the arguments that some commands need; argparse complains of those first.
    with pytest.raises(SystemExit) as ended:
        main(["--nope", "x"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"{name.rpartition('.')[2]}: refused: ") and error.count("\n") == 1
    assert f"(see python -m {name} --help)" in error


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_the_modules_docstring_without_its_lines_of_usage(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = _module(name)
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert (module.__doc__ or "").partition("\n")[0] in text
    assert text.count(f"python -m {name} ") <= 2, "the usage stands there twice"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints_cannot_fail_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            _module(name).main(["--help"])
        sys.stdout.write("x" * 100_000)
        sys.stdout.flush()
        sys.stdout.write("left in the buffer")
    assert ended.value.code == 0


def test_a_head_of_more_cpus_than_any_machine_has_is_refused_before_ray_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        _module("cluster.head").main(["up", "--num-cpus", "1e30"])
    assert ended.value.code == 2
    assert "--num-cpus: must be a whole number from 1 to 10000, got '1e30'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tasks.plan", ["", "--json"]),
        ("tasks.train", [""]),
        ("tasks.report", ["run", "--out", ""]),
        ("tasks.probe", ["--nvme-dir", ""]),
        ("cluster.head", ["up", "--temp-dir", ""]),
        ("cluster.submit", ["--working-dir", "", "x"]),
    ],
)
def test_an_empty_path_is_refused_and_not_the_current_folder(
    name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _module(name).main(arguments)
    assert ended.value.code == 2
    assert "must be a path, got ''" in capsys.readouterr().err


def test_the_help_of_a_command_within_a_command_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("cluster.head").main(["up", "--port", "x"])
    error = capsys.readouterr().err
    assert error.startswith("head: refused: argument --port: must be a whole number from 1 to 65535, got 'x'")
    assert "python -m cluster.head up --help" in error


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (positive, {"0.5": 0.5, "3": 3.0}, ("0", "-1", "nan", "inf", "x", "")),
        (not_negative, {"0": 0.0, "2.5": 2.5}, ("-0.1", "nan", "inf", "x")),
        (count, {"1": 1, "2e9": 2_000_000_000}, ("0", "-1", "1.5", "nan", "1e999", "x")),
        (count_to(10), {"1": 1, "1e1": 10}, ("0", "11", "1e30", "x", "")),
        (port, {"1": 1, "65535": 65_535}, ("0", "65536", "-1", "80.5", "x")),
    ],
)
def test_numbers(kind: Callable[[str], float], good: dict[str, float], bad: tuple[str, ...]) -> None:
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="must be a"):
            kind(text)
