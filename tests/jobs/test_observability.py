"""While a run trains as a job, Ray shows what it is doing: named actors, named operations in time, gauges."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.environment import client_environment
from cluster.state import StateDirectory
from support.small_recipe import SMALL_MODEL
from tiers.checkpoint import newest_complete
from tiers.manifest import read_manifest, verify

REPOSITORY = Path(__file__).resolve().parents[2]

RECIPE = (
    SMALL_MODEL
    + """
[run]
name = "observed"
dir = "{run_dir}"
[data]
path = "{data}"
[train]
steps = 100000
sequence_length = 64
sequences_per_step = 4
micro_batch = 2
device = "cpu"
[optimizer]
lr = 1e-4
# Without clipping an update runs beside the backward pass of the layer below, in every step.
max_grad_norm = 0
[memory]
optimizer_actors = 1
"""
)

pytestmark = pytest.mark.ray


@dataclass(frozen=True)
class Seen:
    """What `watch_job` saw while the job ran."""

    actors: list[str]
    """Of those alive."""
    gauges: dict[str, float]
    timeline: list[tuple[str, float, float]]
    tasks: list[str]
    rows_of_updates: set[str]
    """Rows of `cluster.timeline` that hold update[3]."""
    job: str
    """As Ray names it."""

    def times(self, *operations: str) -> list[tuple[float, float]]:
        """Begin and end of operations, whatever their layer."""
        return [(start, end) for name, start, end in self.timeline if name.split("[")[0] in operations]


@dataclass(frozen=True)
class Head:
    """A Ray head of these tests' own, as a user starts one."""

    root: Path

    @property
    def environ(self) -> dict[str, str]:
        return os.environ | {"MEGATRAIN_STATE": str(self.root / "state")}

    def run(self, *command: str, **environment: str) -> str:
        """Run one of our commands and return what it prints."""
        return self.completed(*command, **environment).stdout

    def completed(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run one of our commands, which must succeed."""
        completed = subprocess.run(
            [sys.executable, *command],
            env=self.environ | environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed

    def recipe(self, name: str, *changes: tuple[str, str]) -> Path:
        """Write the recipe of a run called `name`, with some of its text changed."""
        data = self.root / "data.txt"
        data.write_text("What is seen from outside is what is believed. " * 200)
        text = RECIPE.format(run_dir=self.root / name, data=data)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = self.root / f"{name}.toml"
        path.write_text(text)
        return path


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A head that is up."""
    head = Head(tmp_path_factory.mktemp("user"))
    try:
        head.run("-m", "cluster.head", "up", "--num-cpus", "2")
        yield head
    finally:
        head.run("-m", "cluster.head", "down", "--job-grace-s", "20")


@pytest.fixture(scope="module")
def seen(head: Head) -> Seen:
    """Observations of a job that `cluster.head down` stops at the end."""
    state = StateDirectory(head.root / "state").load()
    assert state is not None
    recipe = head.recipe("observed")
    submit = ("-m", "cluster.submit", "--no-wait", "--")
    submitted = head.completed(*submit, "python", "-m", "tasks.train", str(recipe)).stderr
    job = re.search(r"raysubmit_\w+", submitted)
    assert job is not None, submitted
    client = client_environment(
        head.environ, address=state.address, dashboard_url=state.dashboard_url, token_path=state.token_path
    )
    watch = str(REPOSITORY / "tests" / "support" / "watch_job.py")
    metrics = str(head.root / "observed" / "metrics.jsonl")
    answer: dict[str, Any] = json.loads(head.run(watch, state.dashboard_url, metrics, **client))
    head.run("-m", "cluster.timeline", "--out", str(head.root / "timeline.json"))
    events = json.loads((head.root / "timeline.json").read_text())
    rows = {event["tid"].split(" (")[0] for event in events if event["name"] == "update[3]"}
    return Seen(**answer, rows_of_updates=rows, job=job[0])


def test_a_job_ends_with_the_bits_of_an_embedded_run(head: Head) -> None:
    ten_steps = ("steps = 100000", "steps = 10")
    submitted, embedded = head.recipe("submitted", ten_steps), head.recipe("embedded", ten_steps)
    head.run("-m", "cluster.submit", "--", "python", "-m", "tasks.train", str(submitted))
    head.run("-m", "tasks.train", str(embedded), RAY_ADDRESS="")
    checkpoints = [head.root / name / "checkpoints" / "step-000010" for name in ("submitted", "embedded")]
    records = [read_manifest(checkpoint).records() for checkpoint in checkpoints]
    assert records[0] == records[1]
    assert not [problem for checkpoint in checkpoints for problem in verify(checkpoint, deep=True)]


def test_actors_are_named_after_what_they_are(seen: Seen) -> None:
    ours = {name for name in seen.actors if not name.startswith("_ray_internal")}
    assert ours == {"compute", "prefetcher", "optimizer-0", "parameter-tier"}


def test_gauges_of_the_run_are_where_prometheus_reads_them(seen: Seen) -> None:
    assert seen.gauges["megatrain_step"] >= 1
    assert 0.0 < seen.gauges["megatrain_loss"] < 20.0
    assert seen.gauges["megatrain_tokens_per_s"] > 0.0


def test_operations_stand_in_task_list_and_timeline_by_name(seen: Seen) -> None:
    assert set(seen.tasks) == {"Compute.forward"}
    names = {name for name, _, _ in seen.timeline}
    assert {"forward[3]", "backward[3]", "update[3]", "stage[3]", "offload[3]", "head", "norm"} <= names
    assert seen.rows_of_updates == {"optimizer-0"}


def test_updates_run_beside_forward_and_backward(seen: Seen) -> None:
    updates, passes = seen.times("update"), seen.times("forward", "backward")
    beside = sum(any(start < end_of and start_of < end for start_of, end_of in passes) for start, end in updates)
    assert beside > len(updates) // 4, f"{beside} of {len(updates)} updates overlap a pass of a layer"


def test_a_stopped_job_has_finished_its_step_and_saved(head: Head, seen: Seen) -> None:
    """The last of these tests: it ends the job that the others look at."""
    state = StateDirectory(head.root / "state").load()
    assert state is not None
    client = client_environment(
        head.environ, address=state.address, dashboard_url=state.dashboard_url, token_path=state.token_path
    )
    said = head.run(str(Path(sys.executable).parent / "ray"), "job", "stop", seen.job, **client)
    log = head.run(str(Path(sys.executable).parent / "ray"), "job", "logs", seen.job, **client)
    assert "was stopped" in said, said
    assert "SIGTERM: finishing the step and saving" in log and "Traceback" not in log
    run_dir = head.root / "observed"
    newest, skipped = newest_complete(run_dir)
    assert newest is not None and not skipped and verify(newest, deep=True) == []
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert newest.name == f"step-{last['step']:06}"
    assert f"stopped after step {last['step']}; the same command goes on from its checkpoint" in log
