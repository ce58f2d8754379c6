"""Faults of the pipeline: models it cannot train, and what goes wrong while it runs.

Every message says what was attempted, what was got, the limit, and what to change. The classes pickle across actors.
"""

from __future__ import annotations


class PipelineError(RuntimeError):
    """A fault of the pipeline: the model, the device or a step."""


class UnsupportedModelError(PipelineError, ValueError):
    """A model's configuration is malformed, or asks for maths that no family here computes."""


class TokenIdError(PipelineError, ValueError):
    """A batch holds a token id that the model has no embedding for; found on the host, before the device sees it."""


class DeviceMemoryError(PipelineError):
    """The device has no memory left for an operation."""


class NonFiniteError(PipelineError):
    """Losses or gradients stopped being finite and the run cannot go on."""


class OperationError(PipelineError):
    """An actor raised an error at an operation of a step."""


class RayLostError(PipelineError):
    """Ray's own processes are gone; without them no actor can be replaced."""


class ActorLostError(PipelineError):
    """An actor's process ended although nobody asked it to; what it held in memory is gone."""
