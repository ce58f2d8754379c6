"""Errors of actors keep their cause on the user's console: a known one in words, a bug of ours with its traceback."""

from __future__ import annotations

import errno
import os
import re
from typing import cast

import pytest
import ray
from ray.exceptions import RayTaskError

from pipeline.call_states import Call
from pipeline.coordinator import Coordinator
from tasks.failure import explain, failure_of, is_death
from tiers.errors import ShardError

KNOWN = [
    (ShardError("/nvme/layer-003: read 512 of 4,096 bytes"), "/nvme/layer-003: read 512 of 4,096 bytes"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/events.jsonl"), "/run/events.jsonl.*ENOSPC.*free space"),
    (ValueError("a batch of 3"), "a batch of 3"),
]


class Forgetful:
    """Stands for a coordinator that knows no more of a call: a snapshot may go on for many steps."""

    def calls(self) -> tuple[Call, ...]:
        return ()


def raised(error: Exception, *, through_another: bool) -> RayTaskError:
    """What a driver gets for an error in an actor, or in one whose result that actor was given."""

    @ray.remote(num_cpus=0)
    class Faulty:
        def work(self, *after: object) -> None:
            if not after:
                raise error

    ref = Faulty.remote().work.remote()
    with pytest.raises(RayTaskError) as told:
        ray.get(Faulty.remote().work.remote(ref) if through_another else ref)
    return told.value


@pytest.mark.ray
@pytest.mark.parametrize("through_another", [False, True])
@pytest.mark.parametrize(("error", "words"), KNOWN, ids=lambda value: type(value).__name__)
def test_a_known_error_of_an_actor_is_told_in_its_own_words(
    ray_local: None, error: Exception, words: str, through_another: bool
) -> None:
    told = raised(error, through_another=through_another)
    assert re.search(f"^.*{words}", explain(told)), explain(told)
    assert "Traceback" not in explain(told) and "\n" not in explain(told) and not is_death(told)
    assert failure_of(cast("Coordinator", Forgetful()), told) == explain(told)


@pytest.mark.ray
def test_an_error_that_nobody_foresaw_keeps_the_traceback_of_its_actor(ray_local: None) -> None:
    told = explain(raised(KeyError("layer 3"), through_another=False))
    assert "layer 3" in told and "in work" in told and "test_failure.py" in told
