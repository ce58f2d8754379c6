"""What a user is told when a run fails: the actor, the operation, the cause, and what to look at."""

from __future__ import annotations

import errno
import re

from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from cluster.command_line import in_words
from pipeline.call_states import at, failed, lost
from pipeline.coordinator import Coordinator
from pipeline.crew import Crew
from pipeline.errors import ActorLostError, PipelineError, RayLostError
from tiers.errors import TierError
from tiers.host_memory import host_headroom
from tiers.quantities import shown_bytes


def explain(error: BaseException, way_on: str = "the same command goes on from the newest checkpoint") -> str:
    """One message for the console. Faults that we do not know keep the actor's own traceback: they are our bugs.

    Args:
        error: What ended the run.
        way_on: How the user goes on from what it has saved; told where the recipe need not change for it.
    """
    if isinstance(error, ActorDiedError):
        return f"an actor could not start: {error}" if error.actor_init_failed else str(error)
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, TierError | PipelineError | ValueError | OSError)
        return in_words(error.cause) if known else str(error)  # which is the actor's traceback
    if isinstance(error, ActorLostError | RayLostError):
        return f"{error}\n{way_on[:1].upper()}{way_on[1:]}."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{in_words(error)}; then {way_on}"
    if isinstance(error, OSError):
        return in_words(error)
    return str(error) or type(error).__name__


def is_death(error: BaseException) -> bool:
    """Whether an actor's process ended, as opposed to raising an error: only that is worth another attempt.

    A call that waited for the dead actor's fails with an error that is both RayTaskError and RayActorError.
    """
    return isinstance(error, ActorLostError) or (
        isinstance(error, RayActorError) and not getattr(error, "actor_init_failed", False)
    )


def failure_of(coordinator: Coordinator, error: RayTaskError) -> str:
    """Which actor raised an error, at which operation and step, and the error itself."""
    call = failed(coordinator.calls())
    return f"{call} failed in the {call.actor}: {explain(error)}" if call else explain(error)


def loss_of(crew: Crew, coordinator: Coordinator, error: BaseException) -> str:
    """Which actors died, at which operation and step, with what memory and limits."""
    calls, dead = coordinator.calls(), crew.processes.dead()
    if not dead and (pid := re.search(r"^\s*pid: (\d+)$", str(error), re.MULTILINE)):
        # Ray can be a moment ahead of the kernel's notice.
        dead = tuple(filter(None, [crew.processes.name_of(int(pid.group(1)))]))
    if not dead:
        return f"an actor does not answer any more: {error}"
    found = []
    for name in dead:
        call = lost(calls, name)
        found.append(f"the actor {name} died {f'at {call}' if call else 'idle'} ({crew.processes.describe(name)})")
    return f"{'; '.join(found)}. {_circumstances(error)}"


def ray_loss() -> str:
    """What to say when Ray itself is gone."""
    return f"Ray's raylet died, and without it no actor can be replaced. {_memory()}"


def loss_at_start(error: BaseException) -> str:
    """Likewise of a death before the crew is complete, told from Ray's text alone."""
    if isinstance(error, ActorLostError):
        return f"{error}. {_memory()}"
    name = re.search(r"^\s*(?:name|class_name): (.+)$", str(error), re.MULTILINE)
    who = f"the actor {name.group(1)}" if name else "an actor"
    return f"{who} died while the actors were starting. {_circumstances(error)}"


def _circumstances(error: BaseException) -> str:
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes|\n|$)", str(error))
    return f"{detail.group(1) + ' ' if detail else ''}{_memory()}"


def _memory() -> str:
    headroom = host_headroom()
    return (
        f"Host memory available now: {shown_bytes(headroom.available_bytes)} (limit: {headroom.limit}). A process "
        "killed without a word was most often ended by the kernel for want of memory: see `dmesg`, and lower "
        "memory.ram_gib."
    )


def actor_states(crew: Crew, coordinator: Coordinator) -> str:
    """Where every actor is, a line each."""
    calls = coordinator.calls()
    return "Actors:" + "".join(
        f"\n  {name}: {at(calls, name)}; {crew.processes.describe(name)}" for name in crew.actors()
    )
