"""The address of a Ray head, as `--address` and `RAY_ADDRESS` name it: HOST:PORT."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from cluster.errors import ClusterRefusedError

_KNOCK_S = 5.0

_FORM = re.compile(r"(?:(?P<name>[^\s:/\[\]]+)|\[(?P<ipv6>[0-9A-Fa-f:.%]+)\]):(?P<port>[0-9]{1,5})")
"""Only in brackets may a host have colons."""


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where a head listens, if it does."""

    host: str
    """A name, or an IP address without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str, named: str) -> HeadAddress:
        """Take an address apart.

        Args:
            text: As the user gave it.
            named: How, for the refusal: `--address` or `RAY_ADDRESS`.

        Raises:
            ClusterRefusedError: It has another form, as `auto`, for which Ray takes whosever head it finds or waits for
                one, and `ray://HOST:PORT`, whose drivers run in the head.
        """
        match = _FORM.fullmatch(text)
        if match is None or not 1 <= int(match["port"]) <= 65_535:
            raise ClusterRefusedError(
                f"{named} {text!r} is not the HOST:PORT of a running Ray head, as `python -m cluster.head status` and "
                "`ray start --head` print it; leave it out to run without one"
            )
        return cls(match["name"] or match["ipv6"], int(match["port"]))

    def knock(self) -> None:
        """Raise OSError where nothing listens: `ray.init` would try for minutes."""
        try:
            with socket.create_connection((self.host, self.port), timeout=_KNOCK_S):
                pass
        except UnicodeError as error:
            raise OSError(f"no host can be named {self.host!r}: {error}") from error
