"""What a user is told when a run fails: the actor, the operation, the cause, and what to look at."""

from __future__ import annotations

import re

from ray.exceptions import ActorDiedError, RayTaskError

from pipeline.errors import PipelineError
from tiers.errors import TierError
from tiers.host_memory import host_headroom


def explain(error: BaseException) -> str:
    """One message for the console. Faults that we do not know keep the actor's own traceback: they are our bugs."""
    if isinstance(error, ActorDiedError):
        return _died(error)
    if isinstance(error, RayTaskError):
        cause = error.cause
        known = isinstance(cause, TierError | PipelineError | ValueError | OSError)
        return f"{error.function_name}: {cause}" if known else f"{error.function_name}:\n{error.traceback_str}"
    return str(error) or type(error).__name__


def _died(error: ActorDiedError) -> str:
    """An actor's process is gone. Ray's text names it; the kernel's reason is a guess that the memory figures help."""
    text = str(error)
    if error.actor_init_failed:
        return f"an actor could not start: {text}"
    name = _field("name", text) or _field("class_name", text) or error.actor_id
    headroom = host_headroom()
    return (
        f"the actor {name} (process {_field('pid', text) or 'unknown'}) died. Host memory available now: "
        f"{headroom.available_bytes / 2**30:.1f} GiB (limit: {headroom.limit}). A process killed without a "
        "word was most often ended by the kernel for want of memory: see `dmesg`, and lower memory.ram_gib. "
        "The run goes on from its last checkpoint when the same command is given again.\n" + text
    )


def _field(name: str, text: str) -> str | None:
    match = re.search(rf"^\s*{name}: (.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else None
