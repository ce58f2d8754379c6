"""Run-time faults of the storage tiers.

Every message says what was attempted, what was got, the limit, and what to change. The classes pickle across actors.
"""

from __future__ import annotations


class TierError(RuntimeError):
    """A fault of the parameter tier: memory, disk or their contents."""


class HostMemoryError(TierError):
    """Host memory does not suffice for what was asked, known before anything was allocated."""


class ShardError(TierError):
    """A file of a store is missing, short, corrupt or could not be written."""


class CheckpointError(TierError):
    """A checkpoint is missing, incomplete, of an unknown version, or does not match what is asked of it."""


class ImportedTensorError(TierError):
    """A tensor of an imported model is missing, unexpected, or of the wrong shape or type."""
