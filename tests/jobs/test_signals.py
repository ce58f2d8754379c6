"""A signal ends a command in words and with a status that is written down, at whatever moment it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.interrupts import INTERRUPT
from support.kills import RECIPE, REPOSITORY, running
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


def run_program(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False, **options)


PROGRAM = """
import signal
from tasks.stop_signals import StopSignals
with StopSignals() as signals:
    signals.finish_and_save()
    for number in ({first}, {second}):
        signal.raise_signal(number)
        print(signals.requested(), flush=True)
"""


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT"), ("SIGHUP", "SIGTERM")])
def test_a_second_signal_quits_at_once(first: str, second: str) -> None:
    ended = run_program(PROGRAM.format(first=f"signal.{first}", second=f"signal.{second}"))
    assert ended.returncode == INTERRUPTED
    assert ended.stdout == f"{first}: finishing the step and saving; a second signal ends the run at once\nTrue\n"


PHASES = """
import contextlib, signal
from tasks.stop_signals import StopSignals
signals = StopSignals()
with signals:
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
        print("went on")
    for phase in (signals.end_at_once, signals.finish_and_save):
        with contextlib.suppress(KeyboardInterrupt):
            phase()
            print("went on", phase)
    print(signals.status())
signal.raise_signal(signal.SIGTERM)
signals.ignore()
signal.raise_signal(signal.SIGINT)
"""


def test_a_signal_before_the_first_step_ends_the_run_whoever_swallows_it_and_none_changes_a_known_ending() -> None:
    ended = run_program(PHASES)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "143\n", "ended by SIGTERM\n")


IGNORING = """
import signal
from tasks.interruption import end_at_signals, whoever_handles_signals
from tasks.stop_signals import StopSignals
end_at_signals()
signal.raise_signal(signal.SIGHUP)
with whoever_handles_signals():
    signal.signal(signal.SIGHUP, lambda *_: print("handled"))
signal.raise_signal(signal.SIGHUP)
with StopSignals() as signals:
    signal.raise_signal(signal.SIGHUP)
    print(signals.requested(), flush=True)
    signal.raise_signal(signal.SIGTERM)
"""


def test_a_signal_that_was_ignored_before_stays_so() -> None:
    """As by `nohup`; and SIGINT by a shell, of what it runs in the background."""
    program = IGNORING
    for name in ("SIGHUP", "SIGINT"):
        ignore = partial(signal.signal, getattr(signal, name), signal.SIG_IGN)
        ended = run_program(program.replace("SIGHUP", name), preexec_fn=ignore)
        assert ended.stdout == "False\n" and "ended by SIGTERM" in ended.stderr, ended.stderr


LIBRARY = """
import signal, subprocess
from tasks.interruption import whoever_handles_signals
with whoever_handles_signals():
    signal.signal(signal.SIGTERM, lambda *_: print("swallowed", flush=True))
    signal.raise_signal(signal.{name})
    blocked = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True).stdout
    print(bool(int(blocked.split()[1], 16) & 1 << signal.SIGHUP - 1), flush=True)
print("went on")
"""


@pytest.mark.parametrize(("name", "said"), [("SIGTERM", "swallowed\nTrue\n"), ("SIGHUP", "True\n")])
def test_a_signal_in_a_library_that_has_handlers_of_its_own_ends_the_command_as_ever(name: str, said: str) -> None:
    """Ray's end the process with other statuses. What it starts never sees that the terminal was closed."""
    ended = run_program(LIBRARY.format(name=name))
    assert ended.returncode == 128 + getattr(signal, name)
    assert (ended.stdout, ended.stderr) == (said, f"ended by {name}\n")


@pytest.mark.ray
def test_a_closed_terminal_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    """In the evaluation that comes before it, when all actors are there. Ray's processes get the signal too."""
    (tmp_path / "text").mkdir()
    for page in range(400):
        (tmp_path / "text" / f"{page}.txt").write_text(f"some words {page} " * 200)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("ram_gib = 0.0022", "ram_gib = 1"))
    run_dir = tmp_path / "new" / "run"
    options, log = ("data.eval_fraction=0.9",), tmp_path / "log"
    with running(tmp_path / "recipe.toml", run_dir, *options, log=log) as started:
        started.wait_for(lambda: started.said(": done in ") == 1, "weights")
        os.killpg(started.process.pid, signal.SIGHUP)
        assert started.finish() == 128 + signal.SIGHUP, started.output()
    assert started.output().endswith("ended by SIGHUP\n") and "Traceback" not in started.output()
    assert not run_dir.parent.exists()
