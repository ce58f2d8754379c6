"""What of a job's log was printed already: Ray cites the end of it once more where the job failed."""

from __future__ import annotations

_CITED = ", last available logs (truncated to 20,000 chars):\n"
_KEPT = 40_000
"""Characters, of which Ray cites fewer."""


class PrintedLog:
    """The end of what was printed of a log."""

    def __init__(self) -> None:
        self._end = ""

    def add(self, text: str) -> None:
        """Note what was printed."""
        self._end = (self._end + text)[-_KEPT:]

    def news(self, message: str) -> tuple[str, str]:
        """Take apart what Ray says of a job that has ended.

        Returns:
            The message alone, and the lines that it cites of the log and that were not printed.
        """
        alone, _, cited = message.partition(_CITED)
        # By lines: in what Ray cites they may end in other ways, and the first may be cut.
        printed, lines = self._end.splitlines(), cited.splitlines()
        seen = next(count for count in range(len(lines), -1, -1) if _ends_with(printed, lines[:count]))
        return alone, "".join(f"{line}\n" for line in lines[seen:])


def _ends_with(printed: list[str], lines: list[str]) -> bool:
    if not lines:
        return True
    last = printed[-len(lines) :]
    return len(last) == len(lines) and last[0].endswith(lines[0]) and last[1:] == lines[1:]
