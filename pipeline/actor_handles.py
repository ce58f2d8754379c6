"""Starting, asking and ending single actors, for the crew: what Ray needs to be told, and what it does not tell."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from pipeline.actor_processes import ActorProcesses
from pipeline.errors import RayLostError

logger = logging.getLogger(__name__)

Handle = Any
"""An actor handle: Ray's typed handles do not carry `.options(name=...)` of a method."""

KILL_GRACE_S = 10.0
"""For processes to end as Ray asks them to."""

END_TIMEOUT_S = 60.0
"""For the kernel to free what a killed actor held: 100 GiB that are registered with a GPU take some seconds."""

LOOK_S = 2.0
"""Between two looks whether Ray itself is still there."""


def options_of(kind: Any, name: str, namespace: str, *, threads: int, gpu: bool = False) -> Any:
    """Options of an actor that is found by `name` in `ray list actors`."""
    return kind.options(
        name=name,
        namespace=namespace,
        num_cpus=0,
        num_gpus=1 if gpu else 0,
        max_restarts=0,
        runtime_env={"env_vars": environment_of(threads=threads, gpu=gpu, given=os.environ)},
    )


def environment_of(*, threads: int, gpu: bool, given: Mapping[str, str]) -> dict[str, str]:
    """Variables of an actor's process beside those `given` to all."""
    environment = {"OMP_NUM_THREADS": str(threads)}
    if not gpu:
        # Ray hides no GPU from an actor that asks for none, and only Compute may touch CUDA.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif "PYTORCH_CUDA_ALLOC_CONF" not in given:
        # Activations and lent state take turns in the same memory: blocks of any size must come out of what others
        # left, and the allocator's usual segments never merge.
        environment["PYTORCH_ALLOC_CONF"] = given.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return environment


def answers(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    """Wait for calls of actors that are starting, and return their results.

    Raises:
        RayLostError: The raylet died: calls of actors that it has not started would wait for ever.
        RayActorError: One of them died or could not be constructed.
        GetTimeoutError: They take longer than `timeout_s`.
    """
    deadline_s, waiting = time.monotonic() + timeout_s, list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_S)
        ray.get(done)
        if waiting and not any(node["Alive"] for node in ray.nodes()):  # type: ignore[no-untyped-call]
            raise RayLostError("Ray's raylet died while the actors were starting")
        if waiting and time.monotonic() > deadline_s:
            raise GetTimeoutError(f"actors did not start within {timeout_s:.0f} s")
    return list(ray.get(list(refs)))


def process_number(actor: object) -> int:
    """For `__ray_call__`: the process that an actor runs in."""
    return os.getpid()


def died(actor: Handle) -> bool:
    """Whether an actor's process has ended, as opposed to its constructor's having raised an error."""
    try:
        ray.get(actor.__ray_call__.remote(process_number), timeout=KILL_GRACE_S)
    except RayActorError as error:
        return not getattr(error, "actor_init_failed", False)
    except RayError:
        return False
    return False


def end_actors(actors: Sequence[Handle], processes: ActorProcesses) -> None:
    """Kill actors and wait until their processes have ended: only then are memory and NVMe directory free."""
    for actor in actors:
        ray.kill(actor, no_restart=True)
    if remaining := processes.wait_until_ended(KILL_GRACE_S, END_TIMEOUT_S):
        logger.warning("%s did not end within %.0f s of being killed", ", ".join(remaining), END_TIMEOUT_S)
    processes.close()
