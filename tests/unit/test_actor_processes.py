"""The driver sees at once which processes have ended, and what they held."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline.actor_processes import ActorProcesses
from pipeline.errors import ActorLostError


@pytest.fixture
def sleepers() -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    first, second = (subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2))
    yield first, second
    for process in (first, second):
        process.kill()
        process.communicate()


def test_a_killed_process_is_named_with_what_it_held(
    sleepers: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    first, second = sleepers
    processes = ActorProcesses({"compute": first.pid, "prefetcher": second.pid})
    assert processes.dead() == ()
    assert processes.private_bytes() > 1 << 20
    assert f"process {first.pid}, " in processes.describe("compute")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert processes.dead() == ("compute",)
    assert re.search(r"ended; held [1-9][\d.]* MiB", processes.describe("compute"))
    assert processes.name_of(first.pid) == "compute"
    assert processes.private_bytes() > 1 << 20
    processes.close()


def test_a_process_that_is_stopped_is_killed_after_the_grace(
    sleepers: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    first, second = sleepers
    os.kill(first.pid, signal.SIGSTOP)
    processes = ActorProcesses({"compute": first.pid, "prefetcher": second.pid})
    assert processes.wait_until_ended(grace_s=0.0, timeout_s=30.0) == ()
    assert first.wait() == second.wait() == -signal.SIGKILL
    processes.close()


def test_watching_leaves_no_descriptor(sleepers: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the directory itself takes one
    processes = ActorProcesses({"compute": sleepers[0].pid})
    processes.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_one_that_is_gone_already_is_named_and_the_others_are_let_go(
    sleepers: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    first, second = sleepers
    second.kill()
    second.wait()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(ActorLostError, match="the actor prefetcher died while the actors were starting"):
        ActorProcesses({"compute": first.pid, "prefetcher": second.pid})
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
