"""Known causes of a head that does not start or work are named before it is started."""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import preflight
from cluster.errors import ClusterRefusedError

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_was_asked_for_and_is_taken_is_refused(taken: int) -> None:
    with pytest.raises(ClusterRefusedError, match=f"--port {taken}: the port is taken"):
        preflight.choose_ports(taken, None)


def test_all_ports_are_free_and_differ_though_the_usual_ones_are_taken(taken: int) -> None:
    ports = preflight.choose_ports(None, None)
    assert len({ports.gcs, ports.dashboard, ports.client_server, taken}) == 4


def test_a_small_dev_shm_is_a_warning_with_the_size_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {Path("/dev/shm"): Usage(64 << 20, 0, 64 << 20)}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: sizes.get(Path(path), Usage(GIB, 0, GIB)))
    (warning,) = preflight.warnings_of(tmp_path, 256 << 20, {})
    assert "64 MiB free" in warning and "--shm-size=512m" in warning


def test_a_disk_over_95_percent_is_a_warning_and_a_full_one_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: Usage(100 * GIB, 96 * GIB, 4 * GIB))
    (warning,) = preflight.warnings_of(tmp_path, 256 << 20, {})
    assert "over 95 % full" in warning and "--temp-dir" in warning
    preflight.require(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: Usage(100 * GIB, 100 * GIB, 1 << 20))
    with pytest.raises(ClusterRefusedError, match="1 MiB free"):
        preflight.require(tmp_path)


def test_a_proxy_that_would_answer_for_the_loopback_is_a_warning(tmp_path: Path) -> None:
    (warning,) = preflight.warnings_of(tmp_path, 0, {"http_proxy": "http://proxy:3128"})
    assert "http_proxy" in warning
    assert preflight.warnings_of(tmp_path, 0, {"http_proxy": "x", "no_proxy": "127.0.0.1"}) == []


def test_a_ray_without_its_dashboard_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name == "aiohttp_cors" else sys)
    with pytest.raises(ClusterRefusedError, match=r"it needs aiohttp_cors: install `ray\[default\]`"):
        preflight.require(tmp_path)


def test_a_temporary_directory_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    preflight.require_short(Path("/tmp/mt-head-abcdefgh"))
    with pytest.raises(ClusterRefusedError, match="Linux allows 107"):
        preflight.require_short(tmp_path / ("x" * 60))


def test_a_second_try_takes_none_of_the_ports_of_the_first_but_those_asked_for(taken: int) -> None:
    first = preflight.choose_ports(None, None)
    second = preflight.choose_ports(None, None, avoid=first)
    assert not {*dataclasses.astuple(first)} & {*dataclasses.astuple(second)}
    assert preflight.choose_ports(None, first.dashboard, avoid=first).dashboard == first.dashboard
