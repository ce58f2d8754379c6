"""What names no head of Ray is refused in words before Ray is asked, which would look around for minutes."""

from __future__ import annotations

import pytest

from cluster.address import HeadAddress
from cluster.errors import ClusterError, ClusterRefusedError
from cluster.join import connect


@pytest.mark.parametrize(
    "address", ["foo", "auto", "local", "", ":1", "h:", "h:0", "h:65536", "h:²", "ray://h:1", "http://h:1", "::1:1"]
)
def test_another_form_than_host_and_port_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterRefusedError, match=r"--address .* is not the HOST:PORT"), connect(address):
        pass
    if address:  # an empty variable is none
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterRefusedError, match=r"RAY_ADDRESS .* is not the HOST:PORT"), connect():
            pass


def test_names_and_addresses_are_taken_apart() -> None:
    for text in ("127.0.0.1:6379", "some-host.of_mine:6379"):
        assert HeadAddress.parse(text, "--address") == HeadAddress(text.rpartition(":")[0], 6379)
    assert HeadAddress.parse("[::1]:1", "--address") == HeadAddress("::1", 1)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "..:1", "x" * 70 + ":1"])
def test_where_nothing_can_listen_is_no_head(address: str) -> None:
    said = r"no Ray head could be joined at .*`python -m cluster.head up`"
    with pytest.raises(ClusterError, match=said), connect(address):
        pass
