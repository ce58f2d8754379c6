"""What a head and its clients get in their environment, and what never stands in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.environment import client_environment, head_environment, left_over, no_proxy, state_directory
from cluster.errors import ClusterError, ClusterRefusedError
from cluster.state import HeadState, StateDirectory

TOKEN = Path("/state/token")
TEMP = Path("/tmp/mt-head-x")


def test_a_head_forgets_other_clusters_and_keeps_the_rest() -> None:
    theirs = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "x", "RAY_TMPDIR": "/t", "LANG": "C", "PATH": "/bin"}
    got = head_environment(theirs, marker="m", token_path=TOKEN, temp_dir=TEMP)
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR"} & got.keys()
    assert got["LANG"] == "C"
    assert got["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/bin"


def test_authentication_is_set_on_both_sides_through_a_file() -> None:
    head = head_environment({}, marker="m", token_path=TOKEN, temp_dir=TEMP)
    client = client_environment({}, address="127.0.0.1:1", dashboard_url="http://127.0.0.1:2", token_path=TOKEN)
    for side in (head, client):
        assert side["RAY_AUTH_MODE"] == "token" and side["RAY_AUTH_TOKEN_PATH"] == str(TOKEN)
        assert "RAY_AUTH_TOKEN" not in side


def test_the_memory_monitor_is_off_and_workers_are_not_niced() -> None:
    head = head_environment({}, marker="m", token_path=TOKEN, temp_dir=TEMP)
    assert head["RAY_memory_monitor_refresh_ms"] == "0" and head["RAY_worker_niceness"] == "0"


def test_a_stopped_job_has_longer_than_the_longest_step_of_the_readme_and_its_checkpoint_take() -> None:
    head = head_environment({}, marker="m", token_path=TOKEN, temp_dir=TEMP)
    assert int(head["RAY_JOB_STOP_WAIT_TIME_S"]) >= 2 * 224


def test_temporary_files_go_with_the_head_and_what_torch_compiled_stays_where_torch_looks_for_it() -> None:
    head = head_environment({"TMPDIR": "/elsewhere"}, marker="m", token_path=TOKEN, temp_dir=TEMP)
    assert head["TMPDIR"] == str(TEMP / "tmp")
    program = "from torch._inductor.runtime.cache_dir_utils import default_cache_dir; print(default_cache_dir())"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert head["TORCHINDUCTOR_CACHE_DIR"] == asked.stdout.strip()
    chosen = head_environment({"TORCHINDUCTOR_CACHE_DIR": "/c"}, marker="m", token_path=TOKEN, temp_dir=TEMP)
    assert chosen["TORCHINDUCTOR_CACHE_DIR"] == "/c"


def test_what_points_at_a_head_that_is_gone_is_all_that_env_set_and_nothing_of_another_cluster() -> None:
    head: dict[str, Any] = {"address": "127.0.0.1:1", "dashboard_url": "http://127.0.0.1:2", "token_path": TOKEN}
    client = client_environment({}, **head)
    shell = {"HOME": "/h", **client}
    assert set(left_over(shell, **head)) == client.keys() - {"no_proxy", "NO_PROXY"}
    del shell["RAY_ADDRESS"]
    assert {"RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_API_SERVER_ADDRESS"} <= set(left_over(shell, **head))
    assert left_over({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/mine", "RAY_ADDRESS": "h:1"}, **head) == []
    assert left_over({}, **head) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "intern"}, "intern,127.0.0.1,localhost"),
        ({"NO_PROXY": "localhost"}, "localhost,127.0.0.1"),
    ],
)
def test_the_loopback_is_exempt_from_proxies(before: dict[str, str], after: str) -> None:
    assert no_proxy(before) == {"no_proxy": after, "NO_PROXY": after}


def test_the_state_directory_follows_its_variables(tmp_path: Path) -> None:
    assert state_directory({"MEGATRAIN_STATE": str(tmp_path)}) == tmp_path
    assert state_directory({"XDG_STATE_HOME": "/xdg"}) == Path("/xdg/megatrain")
    assert state_directory({}) == Path.home() / ".local" / "state" / "megatrain"


def test_state_and_token_are_private_and_come_back_equal(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path / "state")
    state = HeadState("m", "127.0.0.1:1", "http://127.0.0.1:2", tmp_path, directory.token_path)
    with directory.locked():
        directory.write_token()
        directory.save(state)
        with pytest.raises(ClusterRefusedError, match="another"), directory.locked():
            pass
    assert directory.load() == state
    assert len(state.token()) == 64
    assert {
        path.stat().st_mode & 0o077 for path in (directory.path, directory.path / "head.json", state.token_path)
    } == {0}
    first = state.token()
    directory.write_token()
    assert state.token() != first
    directory.clear()
    assert directory.load() is None and not state.token_path.exists()


HEAD = '"format_version": 1, "token_path": "/t", "processes": []'


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", '{"format_version": 2}', "[1]", '"x"', "null", "7"),
        f'{{{HEAD}, "marker": "m", "address": "h:1", "dashboard_url": null, "temp_dir": "/mt-head-x"}}',
        f'{{{HEAD}, "marker": "m", "address": 7, "dashboard_url": "u", "temp_dir": "/mt-head-x"}}',
        f'{{{HEAD}, "marker": "", "address": "h:1", "dashboard_url": "u", "temp_dir": "/mt-head-x"}}',
        f'{{{HEAD}, "marker": "m", "address": "h:1", "dashboard_url": "u", "temp_dir": ""}}',
        "\udcff",
    ],
)
def test_a_state_file_that_is_none_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "head.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ClusterError, match=r"head\.json is not the state of a head"):
        StateDirectory(tmp_path).load()
