"""Faults of starting, finding or using a Ray head. They pickle, and say what to change."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """A head could not be started, reached or stopped: the process ends with status 1."""


class ClusterRefusedError(ClusterError, ValueError):
    """What was asked cannot be done as asked, and nothing was started or changed: status 2."""


class OutputRefusedError(ValueError):
    """The place that a command's result was to be written to takes none: status 2."""


def said(error: BaseException) -> str:
    """What an error of others says, without the full stop at its end: a sentence goes on after it."""
    return str(error).rstrip(". \n")
