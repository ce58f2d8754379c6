"""A head comes up beside another, takes jobs from those who have its token, and goes without a trace."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import preflight
from cluster.lifecycle import HeadSettings, start, stop
from cluster.processes import end, processes_of
from cluster.state import HeadState, StateDirectory

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.ray


class Machine:
    """Runs commands of a user whose head lives in `state` and whose jobs take `work` along."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self.environ = os.environ | {"MEGATRAIN_STATE": str(self.state), "PYTHONPATH": str(REPOSITORY)}
        self.environ |= {"RAY_AUTH_TOKEN": "another cluster's", "http_proxy": "http://127.0.0.1:9"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command, env=self.environ, cwd=self.work, capture_output=True, text=True, timeout=200, check=False
        )

    def head(self) -> HeadState:
        state = StateDirectory(self.state).load()
        assert state is not None
        return state


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("user"))
    try:
        up = machine.run("cluster.head", "up", "--num-cpus", "1")
        assert up.returncode == 0, up.stderr
        assert machine.head().token() not in up.stdout + up.stderr
        yield machine
    finally:
        down = machine.run("cluster.head", "down", "--job-grace-s", "5")
        assert down.returncode == 0, down.stderr


def test_a_second_up_is_refused_and_changes_nothing(machine: Machine) -> None:
    before = machine.head()
    refused = machine.run("cluster.head", "up")
    assert refused.returncode == 2
    assert before.address in refused.stderr
    assert machine.head() == before


def test_the_dashboard_answers_only_those_who_have_the_token(machine: Machine) -> None:
    head = machine.head()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as refusal:
        opener.open(f"{head.dashboard_url}/api/jobs/")
    refusal.value.close()
    assert refusal.value.code == 401
    status = machine.run("cluster.head", "status", "--json")
    assert json.loads(status.stdout)["resources"]["CPU"] == 1.0


def test_a_job_runs_this_interpreter_with_its_directory_and_its_exit_status_comes_back(machine: Machine) -> None:
    (machine.work / "beside.py").write_text("WORD = 'taken along'\n")
    (machine.work / "job.py").write_text(
        "import os, sys, beside\nprint(sys.executable, beside.WORD, os.nice(0))\nsys.exit(7)\n"
    )
    submitted = machine.run("cluster.submit", "--", "python", "job.py")
    assert f"{sys.executable} taken along {os.nice(0)}" in submitted.stdout
    assert submitted.returncode == 7


def test_plain_ray_job_submit_works_with_the_printed_environment(machine: Machine) -> None:
    (machine.work / "job.py").write_text("import sys\nprint('ran', sys.executable)\n")
    ray = Path(sys.executable).parent / "ray"
    script = f'eval "$("$0" -m cluster.head env)" && "{ray}" job submit --working-dir . -- python job.py'
    submitted = subprocess.run(
        ["bash", "-c", script, sys.executable],
        env=machine.environ,
        cwd=machine.work,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stderr
    assert f"ran {sys.executable}" in submitted.stdout


def test_what_a_failed_job_said_is_printed_once_and_what_is_excluded_is_no_warning(machine: Machine) -> None:
    for folder in (".git", ".venv"):
        (machine.work / folder).mkdir(exist_ok=True)
    (machine.work / "job.py").write_text("import sys\nprint('said', 6 * 7)\nsys.exit(7)\n")
    submitted = machine.run("cluster.submit", "--", "python", "job.py")
    assert (submitted.stdout + submitted.stderr).count("said 42") == 1
    assert "exit code 7" in submitted.stderr and "ignored by default" not in submitted.stderr + submitted.stdout


STOPPABLE = """
import signal, sys
def stop(*_):
    print('saved', flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
print('started', flush=True)
signal.pause()
"""


@contextmanager
def followed(machine: Machine) -> Iterator[subprocess.Popen[str]]:
    """A job that has started and is followed, and that ends with 3 when it is stopped."""
    (machine.work / "job.py").write_text(STOPPABLE)
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "cluster.submit", "--", "python", "job.py"],
        env=machine.environ,
        cwd=machine.work,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as submitted:
        assert submitted.stdout is not None
        for line in submitted.stdout:
            if line == "started\n":
                break
        yield submitted


def test_an_interrupt_stops_the_job_politely_and_ends_with_its_status(machine: Machine) -> None:
    with followed(machine) as submitted:
        submitted.send_signal(signal.SIGINT)
        assert submitted.stdout is not None and "saved" in submitted.stdout.read()
        assert submitted.wait(60) == 3


def test_all_that_a_head_and_its_jobs_listen_on_is_this_machine_s_alone(machine: Machine) -> None:
    head = machine.head()
    with followed(machine) as submitted:
        owners = {process.pid for process in processes_of(head.marker, head.processes)}
        ports = [each for each in psutil.net_connections("inet") if each.status == "LISTEN" and each.pid in owners]
        submitted.send_signal(signal.SIGINT)
    assert len(ports) >= 8 and {each.laddr.ip for each in ports} <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_status_says_where_metrics_are_and_sizes_as_people_read_them(machine: Machine) -> None:
    url = json.loads(machine.run("cluster.head", "status", "--json").stdout)["metrics_url"]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        assert b"\nray_" in answer.read()
    shown = machine.run("cluster.head", "status").stdout
    assert f"metrics      {url} " in shown
    assert re.search(r"CPU 1, memory [0-9.,]+ [GM]iB, object_store_memory 256 MiB\n", shown)


def test_goes_without_a_trace_and_leaves_its_neighbour_alone(machine: Machine, tmp_path: Path) -> None:
    second = Machine(tmp_path)
    up = second.run("cluster.head", "up", "--json")
    assert up.returncode == 0, up.stderr
    head, neighbour = second.head(), machine.head()
    assert list((head.temp_dir / "tmp").glob("pymp-*")), "else the dashboard left it in the machine's"
    shell = dict(re.findall(r"^export (\w+)=(.*)$", second.run("cluster.head", "env").stdout, re.MULTILINE))
    second.environ |= shell
    assert json.loads(up.stdout)["dashboard_url"] != neighbour.dashboard_url
    assert head.temp_dir.stat().st_mode & 0o077 == 0
    with followed(second) as submitted:
        down = second.run("cluster.head", "down")
        assert submitted.stdout is not None and "saved" in submitted.stdout.read(), (
            "the head went before its last words"
        )
        assert submitted.wait(60) == 3
    assert down.returncode == 0, down.stderr
    (unset,) = (line.split()[1:] for line in down.stdout.splitlines() if line.startswith("  unset "))
    assert set(unset) == shell.keys() - {"no_proxy", "NO_PROXY"}
    assert processes_of(head.marker, head.processes) == frozenset()
    assert not head.temp_dir.exists() and not head.token_path.exists()
    assert StateDirectory(second.state).load() is None
    assert machine.run("cluster.head", "status").returncode == 0
    assert second.run("cluster.head", "status").returncode == 3
    assert second.run("cluster.submit", "--", "python", "x.py").returncode == 2


def test_what_a_killed_head_left_is_cleared_by_the_next_up(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        assert machine.run("cluster.head", "up").returncode == 0
        dead = machine.head()
        for process in processes_of(dead.marker, dead.processes):
            process.send(signal.SIGKILL)
        assert end(dead.marker, dead.processes, grace_s=5.0) == frozenset()
        assert machine.run("cluster.head", "status").returncode == 3
        again = machine.run("cluster.head", "up")
        assert again.returncode == 0, again.stderr
        assert "clearing what a dead head left" in again.stderr
        assert not dead.temp_dir.exists() and machine.head().marker != dead.marker
    finally:
        machine.run("cluster.head", "down")


def test_a_port_taken_between_choice_and_use_is_another_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[preflight.Ports] = []
    choose = preflight.choose_ports
    with socket.socket() as other:

        def choose_and_lose(*asked: int | None, avoid: preflight.Ports | None = None) -> preflight.Ports:
            chosen.append(choose(*asked, avoid=avoid))
            if len(chosen) == 1:
                with suppress(OSError):  # lost already, to the head of another test
                    other.bind(("127.0.0.1", chosen[0].dashboard))
                    other.listen()
            return chosen[-1]

        monkeypatch.setattr(preflight, "choose_ports", choose_and_lose)
        directory, said = StateDirectory(tmp_path / "state"), list[str]()
        try:
            head = start(directory, HeadSettings(num_cpus=1), said.append)
            assert head.dashboard_url.endswith(f":{chosen[1].dashboard}") and len(chosen) == 2
        finally:
            stop(directory, say=said.append)
    assert any("already occupied" in line for line in said)
    assert any("a load of " in line for line in said)


def test_a_head_whose_agent_gets_no_port_is_not_ready_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray goes on without it, and every submission would fail."""
    run, tried = subprocess.run, list[int]()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"--dashboard-agent-listen-port={other.getsockname()[1]}"

        def run_once_with_it(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
            tried.append(len(tried))
            lost = [taken if part.startswith(taken.partition("=")[0]) else part for part in command]
            assert lost != command
            return run(lost if len(tried) == 1 else command, **options)

        monkeypatch.setattr(subprocess, "run", run_once_with_it)
        directory, said = StateDirectory(tmp_path / "state"), list[str]()
        try:
            start(directory, HeadSettings(num_cpus=1), said.append)
        finally:
            stop(directory, say=said.append)
    assert len(tried) == 2 and any("agent" in line and "got no port" in line for line in said)
