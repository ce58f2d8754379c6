"""A signal ends a command in words and with a status that is written down, at whatever moment it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.interrupts import INTERRUPT
from support.kills import RECIPE, REPOSITORY
from tasks.stop_signals import INTERRUPTED

COMMANDS = sorted(
    {
        f"tasks.{path.stem}"
        for path in (REPOSITORY / "tasks").glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    | {f"tasks.{path.parent.name}" for path in (REPOSITORY / "tasks").glob("*/__main__.py")}
)


def run(module: str, *arguments: str, interrupt: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = [REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests" / "support" / "inside"]
    environment = os.environ | {INTERRUPT: interrupt, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_every_command_is_among_those_tried() -> None:
    assert {"tasks.train", "tasks.plan", "tasks.probe", "tasks.bench", "tasks.export_hf", "tasks.inspect"} <= set(
        COMMANDS
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_in_the_first_moment_of_a_command_ends_it_without_a_traceback(
    command: str, tmp_path: Path
) -> None:
    ended = run(command, interrupt="SIGINT import argparse", cwd=tmp_path)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "ended by SIGINT\n", "")


@pytest.mark.parametrize("module", ["numpy", "torch", "transformers.models"])
def test_an_interrupt_in_the_imports_of_a_library_ends_the_command_without_a_traceback(
    module: str, tmp_path: Path
) -> None:
    ended = run("tasks.train", "none.toml", interrupt=f"SIGINT import {module}", cwd=tmp_path)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "ended by SIGINT\n", "")


def test_a_signal_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    text = tmp_path / "text" / "0.txt"
    text.write_text("some words " * 500)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("ram_gib = 0.0022", "ram_gib = 1"))
    run_dir = tmp_path / "new" / "run"
    ended = run(
        *("tasks.train", "recipe.toml", "--set", f"run.dir={run_dir}", "--set", "data.eval_fraction=0.01"),
        interrupt=f"SIGTERM open {text}",
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "ended by SIGTERM\n"), ended.stdout
    assert not run_dir.parent.exists()


PROGRAM = """
import signal
from tasks.stop_signals import StopSignals
with StopSignals() as signals:
    for number in ({first}, {second}):
        signal.raise_signal(number)
        print(signals.requested(), flush=True)
"""


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"), ("SIGTERM", "SIGTERM")])
def test_a_second_signal_quits_at_once(first: str, second: str) -> None:
    program = PROGRAM.format(first=f"signal.{first}", second=f"signal.{second}")
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == INTERRUPTED
    assert ended.stdout == f"{first}: finishing the step and saving; a second signal ends the run at once\nTrue\n"
