"""A crew that cannot start is gone when its error is there: the next one finds memory and NVMe directory free."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import ray

from pipeline.actor_processes import ActorProcesses
from pipeline.crew import Crew, CrewSettings
from support.inline import Case
from support.tiny import tiny_config
from tiers.arena import ARENA_NAME
from tiers.arena_users import ArenaIdentity
from tiers.parameter_tier import ParameterTier


def processes_with_an_arena() -> list[str]:
    """Of this test's Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any(ARENA_NAME in mapping.path for mapping in process.memory_maps()):
                found.append(f"{process.pid} {process.cmdline()[0]}")
        except psutil.Error:
            continue
    return found


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_actors_of_a_crew_that_could_not_start_have_ended_when_it_says_so(tmp_path: Path) -> None:
    case = Case(tiny_config("llama"), state_on_nvme=(1, 2, 3), nvme_dir=tmp_path / "none")
    tier_plan, _ = case.plans()
    settings = CrewSettings(2, 1, 2, None, case.nvme_dir)
    with pytest.raises(ray.exceptions.ActorDiedError, match="NVMe directory"):
        Crew.start(case.spec(), tier_plan, case.compute_settings(), case.optimizer_settings(), settings, "no start")
    assert processes_with_an_arena() == []


def test_a_crew_is_ended_whatever_comes_of_closing_its_prefetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr("pipeline.crew.end_actors", lambda actors, processes: ended.extend(actors))

    class Prefetcher:
        @property
        def close(self) -> object:
            raise KeyboardInterrupt  # the second signal

    prefetcher = Prefetcher()
    with pytest.raises(KeyboardInterrupt), Crew("tier", prefetcher, ["optimizer"], "compute", ActorProcesses({})):
        pass
    assert ended == ["tier", prefetcher, "compute", "optimizer"]


def test_whoever_has_an_arena_mapped_is_found_and_the_owner_of_one_that_is_closed() -> None:
    tier_plan, _ = Case(tiny_config("llama")).plans()
    tier = ParameterTier(tier_plan, threads=1)
    handle = tier.handle()
    identity = ArenaIdentity.of(handle.arena)
    assert identity.users() == {psutil.Process().pid}
    processes = ActorProcesses.with_arena(identity)
    assert processes.dead() == () and processes.describe(f"process {psutil.Process().pid}").startswith("process ")
    processes.close()
    tier.close()
    with pytest.raises(OSError):
        ArenaIdentity.of(handle.arena)
