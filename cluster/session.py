"""What the Ray of a head writes into its session directory about itself: the ports that it listens on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.environment import SESSION_FOLDER


@dataclass(frozen=True, slots=True)
class Session:
    """The session of the head whose directory is `temp_dir`."""

    temp_dir: Path

    @property
    def logs(self) -> Path:
        """Folder of the logs of Ray's processes."""
        return self._directory / "logs"

    def agent_port(self) -> int | None:
        """Where jobs are started; None while Ray has not said, -1 where its agent has no such port and gets none."""
        return self._port("dashboard_agent_listen_port")

    def metrics_port(self) -> int | None:
        """Where metrics are read; None or -1 likewise."""
        return self._port("metrics_export_port")

    @property
    def _directory(self) -> Path:
        return self.temp_dir / SESSION_FOLDER / "session_latest"

    def _port(self, name: str) -> int | None:
        for path in self._directory.glob(f"{name}_*"):  # one a node, by its id, and a head is one node
            text = path.read_text().strip()
            return int(text) if text else None
        return None
