"""A head is ready when Ray says so, whoever listens on a port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.dashboard import Dashboard
from cluster.errors import ClusterError, said
from cluster.exit_status import ExitStatus
from cluster.quantities import amount
from cluster.session import Session
from cluster.state import HeadState


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dashboard:
    """Of a head in `tmp_path`; it answers."""

    def answer(self: Dashboard, method: str, path: str) -> Any:
        return {}

    monkeypatch.setattr(Dashboard, "_request", answer)
    (tmp_path / "ray" / "session_latest").mkdir(parents=True)
    return Dashboard(HeadState("m", "127.0.0.1:1", "http://127.0.0.1:1", tmp_path, tmp_path / "token"))


def write_port(temp_dir: Path, text: str) -> None:
    (temp_dir / "ray" / "session_latest" / "dashboard_agent_listen_port_0123abcd").write_text(text)


def test_a_head_is_ready_with_its_agents_port_and_not_before(dashboard: Dashboard, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ClusterError, match="agent, which starts jobs, has no port yet"):
            dashboard.wait_until_ready(0.0)
        write_port(tmp_path, "")
    write_port(tmp_path, "40123")
    dashboard.wait_until_ready(0.0)
    assert Session(tmp_path).agent_port() == 40123


def test_an_agent_that_gets_no_port_is_not_waited_for(dashboard: Dashboard, tmp_path: Path) -> None:
    write_port(tmp_path, "-1")
    with pytest.raises(ClusterError, match="got no port"):
        dashboard.wait_until_ready(3600.0)


def test_an_exit_status_is_known_after_its_file_is_gone(tmp_path: Path) -> None:
    status = ExitStatus.expect(tmp_path, "some")
    assert status() is None
    (tmp_path / "some").write_text("3\n")
    (tmp_path / "some").unlink()
    assert status() == 3


def test_amounts_are_shown_as_people_read_them() -> None:
    shown = [amount("CPU", 2.0), amount("memory", 2.39847e10), amount("object_store_memory", 2.68435456e8)]
    assert shown == ["CPU 2", "memory 22.3 GiB", "object_store_memory 256 MiB"]
    assert amount("memory", 1.5 * 2**40) == "memory 1,536 GiB"


def test_a_sentence_goes_on_after_what_others_say() -> None:
    assert said(RuntimeError("please try again later..")) == "please try again later"
