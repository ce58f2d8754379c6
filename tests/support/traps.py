"""Kills a process of a run at an exact point: at the beginning, amid or at the end of an operation, or before a change
to a file of a checkpoint.

`install` runs inside every process of the run (see `inside/sitecustomize.py`). A test arms one trap at a time by a
file; the process that comes to its point takes the file away and kills the victim, by SIGKILL as the kernel would.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from support.file_changes import FileChanges

INSIDE = "MEGATRAIN_INSIDE"
"""Variable that names the folder where test and processes meet."""
RUN_DIR = "MEGATRAIN_RUN_DIR"

MODULES = ("tiers.parameter_tier", "tiers.prefetcher", "pipeline.updates.optimizer_pool", "pipeline.compute.compute")
OPERATIONS = {
    "ParameterTier": (),
    "Prefetcher": ("load_weights", "load_state", "store_state", "snapshot", "capture", "restore"),
    "Optimizer": ("update",),
    "Compute": (
        *("begin", "stage", "forward", "head", "backward", "offload", "loss", "norm", "evaluate_head"),
        *("lend_state", "update_on_device", "return_state", "recompute", "store_sum", "fetch_sum"),
    ),
}
"""Of the classes behind the actors, defined in MODULES. Each class has the point `start` too."""

ACTORS = {
    "compute": "Compute",
    "prefetcher": "Prefetcher",
    "optimizer-0": "Optimizer",
    "parameter-tier": "ParameterTier",
}

POWER = "power"
"""Victim: everything at once. The process that springs the trap only stops where it is; the test does the rest."""


@dataclass(frozen=True)
class Trap:
    """Where to kill whom."""

    point: str
    """An operation, `start CLASS`, or a change to a file as `changes` lists them."""
    victim: str
    """Name of an actor, `driver`, `raylet` or POWER."""
    moment: str = "begin"
    """`begin`, `amid` or `end`; a change to a file has a beginning only."""
    skip: int = 0
    """Times that the point is passed before."""
    number: int = signal.SIGKILL
    """Signal that the victim gets."""

    def arm(self, folder: Path, driver: int) -> None:
        """Set it, for the run whose driver is a process."""
        partial = folder / "armed.partial"
        partial.write_text(json.dumps(asdict(self) | {"driver": driver, "id": time.monotonic_ns()}))
        partial.rename(folder / "armed")

    @staticmethod
    def sprung(folder: Path) -> bool:
        """Whether the trap that was set last has killed; its file is removed then."""
        with suppress(FileNotFoundError):
            (folder / "sprung").unlink()
            return True
        return False


def raylet_of(driver: int) -> int | None:
    """Process number of the raylet of an embedded Ray."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, name, _, parent = re.fullmatch(r"(\d+) \((.*)\) (\S) (\d+) .*\s", stat.read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
            if name == "raylet" and int(parent) == driver:
                return int(pid)
    return None


def install() -> None:
    """Make this process look for traps."""
    global _traps
    folder = Path(os.environ[INSIDE])
    _traps = _Traps(folder)
    sys.meta_path.insert(0, _Finder())
    sys.addaudithook(FileChanges(_traps.reach, folder, Path(os.environ[RUN_DIR]) / "checkpoints"))


class _Traps:
    """What this process knows of traps. Thread-safe as far as it matters: the file is taken away once."""

    def __init__(self, folder: Path) -> None:
        self._armed, self._sprung, self.folder = folder / "armed", folder / "sprung", folder
        self._passed: dict[int, int] = {}

    def reach(self, point: str, moment: str) -> None:
        """Spring the trap that lies here, if any."""
        trap = self.at(point)
        if trap is None or trap["moment"] != moment:
            return
        passed = self._passed[trap["id"]] = self._passed.get(trap["id"], -1) + 1
        if passed >= trap["skip"]:
            self._spring(trap)

    def at(self, point: str) -> dict[str, Any] | None:
        """The trap at a point."""
        try:
            trap: dict[str, Any] = json.loads(self._armed.read_text())
        except FileNotFoundError:
            return None
        return trap if trap["point"] == point else None

    def _spring(self, trap: dict[str, Any]) -> None:
        """Kill, unless another thread or process was faster."""
        victim = self._process(trap["victim"], trap["driver"])
        if victim is None:
            return
        try:
            self._armed.rename(self._sprung)
        except FileNotFoundError:
            return
        if trap["victim"] == POWER:
            # To this thread: sent to the process, another one may take it, and this one make the change meanwhile.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        else:
            os.kill(victim, trap["number"])

    def _process(self, victim: str, driver: int) -> int | None:
        if victim == POWER:
            return os.getpid()
        if victim == "driver":
            return driver
        if victim == "raylet":
            return raylet_of(driver)
        pid = int((self.folder / f"{ACTORS[victim]}.pid").read_text())
        return pid if Path(f"/proc/{pid}").exists() else None


_traps: _Traps | None = None


def _here() -> _Traps:
    assert _traps is not None
    return _traps


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the operations of the actors' classes when their modules make Ray's actors of them.

    Not later: Ray takes the functions out of the class and sends them to the actors' processes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            import ray

            remote = ray.remote

            def wrap_and_remote(*arguments: Any, **options: Any) -> Any:
                return remote(_wrapped(arguments[0])) if arguments else lambda kind: remote(**options)(_wrapped(kind))

            ray.remote = wrap_and_remote
            try:
                execute(module)
            finally:
                ray.remote = remote

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def _wrapped(kind: Any) -> Any:
    name, construct = kind.__name__, kind.__init__
    if name not in OPERATIONS or hasattr(construct, "__wrapped__"):  # modules import one another
        return kind

    @functools.wraps(construct)
    def start(actor: Any, *arguments: Any, **options: Any) -> None:
        (_here().folder / f"{name}.pid").write_text(str(os.getpid()))
        _here().reach(f"start {name}", "begin")
        construct(actor, *arguments, **options)
        _here().reach(f"start {name}", "end")

    kind.__init__ = start
    for operation in OPERATIONS[name]:
        setattr(kind, operation, _trapped(operation, getattr(kind, operation)))
    return kind


def _trapped(point: str, call: Callable[..., Any]) -> Callable[..., Any]:
    usual_s = 0.0

    @functools.wraps(call)
    def trapped(*arguments: Any, **options: Any) -> Any:
        nonlocal usual_s
        _here().reach(point, "begin")
        trap = _here().at(point)
        if trap is not None and trap["moment"] == "amid":
            threading.Timer(usual_s / 2, _here().reach, (point, "amid")).start()
        start_s = time.monotonic()
        result = call(*arguments, **options)
        usual_s = time.monotonic() - start_s
        _here().reach(point, "end")
        return result

    return trapped
