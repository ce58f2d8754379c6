"""The last words of the demo hold for the run that they stand under, also where its user stops it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import demo
from tasks.demo_words import next_steps, sample, stopped


def test_a_sample_ends_where_only_blanks_follow_and_after_a_few_lines() -> None:
    code = "class Queue:\n    def __init__(self):\n        self.a = 1"
    assert sample(code + "\n" + " " * 90 + "''" + "\n" * 40) == code
    assert sample(code + " " * 90 + '"""') == code
    assert sample("x \n" * 100).splitlines() == ["x"] * 8
    assert sample("y" * 500) == "y" * 100


def test_a_head_that_stays_is_submitted_to_and_none_is_started_beside_it() -> None:
    python, run = Path("/v/python"), Path("/d/run")
    kept = next_steps(python, "r.toml", run, Path("/d/state"))
    assert "MEGATRAIN_STATE=/d/state" in kept and "cluster.head up" not in kept
    gone = next_steps(python, "r.toml", run, None)
    assert "MEGATRAIN_STATE" not in gone and "cluster.head up" in gone
    assert all("--set run.dir=/" in text for text in (kept, gone)), "else it goes to a place that nobody named"


def test_a_stopped_demo_names_the_command_that_goes_on_where_there_is_one() -> None:
    said = stopped(Path("/a b"), ["python", "-m", "tasks.train", "--set", 'run.dir="/r"'])
    assert "cd '/a b'" in said and "python -m tasks.train --set 'run.dir=\"/r\"'" in said
    assert "tasks.train" not in stopped(Path("/a"), None)


@pytest.mark.parametrize(
    ("status", "resumes", "goes_on"), [(3, False, True), (143, False, False), (130, False, False), (143, True, True)]
)
def test_a_stage_that_was_stopped_goes_on_where_it_has_saved_or_can_be_done_over(
    status: int, resumes: bool, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head: Any = None
    monkeypatch.setattr(demo, "submit", lambda *_: SimpleNamespace(submission_id="some"))
    monkeypatch.setattr(demo, "follow", lambda _: status)
    with pytest.raises(demo.DemoStoppedError) as stop:
        demo._job(head, ["tasks.train", "r.toml"], resumes=resumes)
    assert stop.value.status == status and (stop.value.goes_on is not None) == goes_on
    monkeypatch.setattr(demo, "follow", lambda _: 1)
    with pytest.raises(demo.DemoError, match=r"`python -m tasks\.train` ended with status 1"):
        demo._job(head, ["tasks.train", "r.toml"], resumes=resumes)


def test_a_stopped_demo_is_no_failure_and_speaks_of_no_head_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, keep: bool) -> int:
        assert keep
        raise demo.DemoStoppedError(3, ["python", "-m", "tasks.train"])

    monkeypatch.setattr(demo, "_demo", stop)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the demo's handlers, which would stay
    assert demo.main(["--keep", "--dir", str(tmp_path / "new")]) == 3
    said = capsys.readouterr()
    assert said.out.startswith("stopped ") and "python -m tasks.train" in said.out and "stays up" not in said.out
    assert said.err == ""
