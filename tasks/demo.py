"""The way of a user in a few minutes: a head comes up, a job trains and exports a small model, the head goes down.

    python -m tasks.demo [--keep] [--dir DIR] [--set section.key=value ...]

Everything lies under one new directory, the head's state too: a head of the user's own is not touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.command_line import CommandParser
from cluster.errors import ClusterError
from cluster.lifecycle import HeadSettings, live_head, start, stop
from cluster.state import HeadState, StateDirectory
from cluster.submit import follow, submit
from tasks import demo_words

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = "tasks/recipes/demo.toml"

_PYTHON = Path(sys.executable)

_NO_SOURCES = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__", "encodings"}
)
"""Folders of the standard library that are not it, are not typical of it, or are tables."""

_HELD_OUT_EVERY = 20
_HELD_OUT_BYTES = 2048
_PROMPT = "class Queue:\n    def __init__(self"
_SAMPLE_TOKENS = 160


_STOPPED = frozenset({3, 130, 143, 129})
"""Exit statuses of our commands that a signal ended: after a checkpoint, or with nothing new to save."""


class DemoError(RuntimeError):
    """A stage of the demo failed; its own message stands above."""


class DemoStoppedError(Exception):
    """A stage of the demo was stopped by its user."""

    def __init__(self, status: int, goes_on: Sequence[str] | None) -> None:
        super().__init__()
        self.status = status
        """Exit status of the stage."""
        self.goes_on = goes_on
        """Command that goes on from what it saved; None where that is nothing."""


@dataclass(frozen=True)
class DemoPaths:
    """Where a demo keeps what."""

    root: Path

    @property
    def data(self) -> Path:
        """Texts to train on, and those held out."""
        return self.root / "data"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.root / "run"

    @property
    def model(self) -> Path:
        """The exported model."""
        return self.root / "model"

    @property
    def state(self) -> StateDirectory:
        """Of the demo's own head."""
        return StateDirectory(self.root / "state")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 when a model was trained and exported, 3 or 128 + signal where it was stopped."""
    parser = CommandParser("tasks.demo", __doc__)
    parser.add_argument("--keep", action="store_true", help="leave the head and its dashboard up at the end")
    parser.add_argument("--dir", type=Path, help="a new directory for all of it (runs/demo-DATE)")
    parser.add_overrides()
    options = parser.parse_args(arguments)
    root: Path = options.dir or REPOSITORY / "runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    paths = DemoPaths(root.absolute())
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _leave)
    try:
        paths.root.mkdir(parents=True)
    except FileExistsError:
        return parser.refuse(f"{paths.root} exists; name a new directory")
    except OSError as error:
        return parser.refuse(f"{paths.root} cannot be made: {error.strerror}")
    try:
        return _demo(paths, options.overrides, keep=options.keep)
    except DemoStoppedError as stopped:
        _say(demo_words.stopped(REPOSITORY, stopped.goes_on))
        return stopped.status
    except (ClusterError, DemoError, OSError) as error:
        return parser.fail(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if options.keep and live_head(paths.state) is not None:
            _say(
                f"the head stays up; stop it with\n  MEGATRAIN_STATE={paths.state.path} {_PYTHON} -m cluster.head down"
            )
        else:
            # Whoever presses Ctrl+C twice still wants the head to be gone.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                stop(paths.state, say=_say)
            except (ClusterError, OSError) as error:
                parser.fail(error)
            shutil.rmtree(paths.state.path, ignore_errors=True)


def _demo(paths: DemoPaths, changes: Sequence[str], *, keep: bool) -> int:
    started = time.monotonic()
    files = copy_standard_library(paths.data)
    _say(
        f"data         {files} files of Python's standard library, every {_HELD_OUT_EVERY}th held out, in {paths.data}"
    )
    head = start(paths.state, HeadSettings(), _say)
    until = "" if keep else " until the demo ends"
    _say(f"dashboard    {head.dashboard_url} (it asks for the token in {head.token_path}{until})")
    settings = {
        "run.dir": paths.run,
        "data.path": paths.data / "train",
        "data.eval_path": paths.data / "held-out",
    }
    sets = [f"{key}={json.dumps(str(value))}" for key, value in settings.items()] + list(changes)
    train = ["tasks.train", RECIPE, *(part for change in sets for part in ("--set", change))]
    _job(head, train, resumes=False)
    _job(head, ["tasks.export_hf", str(paths.run), str(paths.model)], resumes=True)
    first, last = held_out_losses(paths.run)
    sample = demo_words.sample(continuation(paths.model, _PROMPT))
    print(
        f"\nlearnt       held-out loss {first:.2f} -> {last:.2f} nats a byte in {time.monotonic() - started:.0f} s\n"
        f"writes\n{textwrap.indent(sample, ' ' * 13)}\n"
        f"run          {paths.run}\n"
        f"model        {paths.model} (Hugging Face format)\n"
        + demo_words.next_steps(_PYTHON, RECIPE, paths.run, paths.state.path if keep else None)
    )
    return 0


def copy_standard_library(data: Path) -> int:
    """Copy this Python's standard library as texts to `data`/train and `data`/held-out; returns the number of files.

    Of a held-out file only a piece from its middle is copied: a short evaluation then sees every one of them.
    """
    files = sorted(_sources(Path(sysconfig.get_path("stdlib"))))
    for kind in ("train", "held-out"):
        (data / kind).mkdir(parents=True)
    for number, (name, path) in enumerate(files):
        if number % _HELD_OUT_EVERY:
            shutil.copyfile(path, data / "train" / f"{name}.txt")
        else:
            content = path.read_bytes()
            middle = max(0, len(content) - _HELD_OUT_BYTES) // 2
            (data / "held-out" / f"{name}.txt").write_bytes(content[middle : middle + _HELD_OUT_BYTES])
    return len(files)


def held_out_losses(run: Path) -> tuple[float, float]:
    """First and last held-out loss of a run, nats a token."""
    rows = [json.loads(row) for row in (run / "evaluation.jsonl").read_text().splitlines()]
    return rows[0]["loss"], rows[-1]["loss"]


def continuation(model: Path, prompt: str) -> str:
    """What the exported byte-level model writes after `prompt`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([list(prompt.encode())])
    torch.manual_seed(0)
    # Sampled: the likeliest byte after an indented line is one more space, for ever.
    written = loaded.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_SAMPLE_TOKENS,
        do_sample=True,
        temperature=0.7,
    )
    return bytes(token for token in written[0].tolist() if token < 256).decode(errors="replace")


def _sources(library: Path) -> Iterator[tuple[str, Path]]:
    """Dotted module name and path of each source file."""
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _NO_SOURCES]
        for name in names:
            path = Path(folder) / name
            if path.suffix == ".py":
                yield ".".join(path.relative_to(library).with_suffix("").parts), path


def _job(head: HeadState, command: Sequence[str], *, resumes: bool) -> None:
    """Run a command as a job from the checkout, to its end.

    Args:
        head: That runs it.
        command: After `python -m`.
        resumes: Whether it can be done over wherever it was stopped; else only after it has saved (3).
    """
    job = submit(head, ["python", "-m", *command], REPOSITORY)
    _say(f"job          {job.submission_id}: python -m {' '.join(command[:2])}")
    status = follow(job)
    if status in _STOPPED:
        raise DemoStoppedError(status, [str(_PYTHON), "-m", *command] if resumes or status == 3 else None)
    if status:
        raise DemoError(f"`python -m {command[0]}` ended with status {status}")


def _leave(signum: int, _frame: object) -> None:
    raise SystemExit(128 + signum)


def _say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
