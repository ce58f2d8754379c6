"""The parameter tier as a plain class and as a Ray actor whose arena other processes work in."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass

import psutil
import pytest
import ray
from ray.actor import ActorClass

from tiers.arena_map import ArenaMap, LayerHome, TierPlan
from tiers.errors import HostMemoryError, TierError
from tiers.layout import (
    ElementType,
    InitKind,
    LayerKind,
    LayerLayout,
    ModelLayout,
    Precision,
    TensorSpec,
    place_tensors,
)
from tiers.parameter_tier import ParameterTier, ParameterTierActor, TierHandle


def make_plan() -> TierPlan:
    layers = [
        LayerLayout(
            index,
            f"layer-{index:04}",
            LayerKind.DECODER,
            *place_tensors([TensorSpec(f"w{index}", (10, 10), 0, True, InitKind.NORMAL, 1.0)]),
        )
        for index in range(2)
    ]
    model = ModelLayout(tuple(layers), Precision.BF16, tied=True)
    return TierPlan(model, (LayerHome(), LayerHome(0, 0)), ElementType.BFLOAT16)


@dataclass(frozen=True)
class Fill:
    layer: int
    value: int


class Writer:
    """Stands for any actor that works in the arena of another."""

    def __init__(self, tier: TierHandle) -> None:
        self.arena, self.map = tier.attach()

    @ray.method
    def fill(self, fill: Fill) -> None:
        self.arena.view(self.map.weights[fill.layer])[:] = fill.value


WriterActor: ActorClass[Writer] = ray.remote(Writer)


def test_the_plain_class_works_without_ray() -> None:
    plan = make_plan()
    tier = ParameterTier(plan, threads=1)
    arena, arena_map = tier.handle().attach()
    assert arena_map == ArenaMap.of(plan)
    assert arena.num_bytes == arena_map.total_bytes
    arena.close()
    tier.close()


def test_a_plan_beyond_the_limit_is_refused() -> None:
    with pytest.raises(HostMemoryError, match="ram_gib"):
        ParameterTier(make_plan(), limit_bytes=4096)


def test_a_handle_survives_pickling() -> None:
    tier = ParameterTier(make_plan(), threads=1)
    assert pickle.loads(pickle.dumps(tier.handle())) == tier.handle()
    tier.close()


@pytest.mark.ray
def test_actors_share_one_arena_and_the_driver_sees_it(ray_local: None) -> None:
    plan = make_plan()
    tier = ParameterTierActor.remote(plan, threads=1)
    handle = ray.get(tier.handle.remote())
    writers = [WriterActor.remote(handle) for _ in range(2)]
    ray.get([writers[0].fill.remote(Fill(0, 11)), writers[1].fill.remote(Fill(1, 22))])
    arena, arena_map = handle.attach()
    with arena:
        assert (arena.view(arena_map.weights[0]) == 11).all()
        assert (arena.view(arena_map.weights[1]) == 22).all()
    for actor in (tier, *writers):
        ray.kill(actor)


@pytest.mark.ray
def test_an_actor_without_room_says_why(ray_local: None) -> None:
    tier = ParameterTierActor.remote(make_plan(), limit_bytes=4096)
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"HostMemoryError.* ram_gib"):
        ray.get(tier.handle.remote())


@pytest.mark.ray
def test_attaching_after_the_owner_was_killed_says_so(ray_local: None) -> None:
    tier = ParameterTierActor.remote(make_plan(), threads=1)
    handle = ray.get(tier.handle.remote())
    attached, _ = handle.attach()
    ray.kill(tier)
    attached.close()
    # Neither Ray's answer nor its report of the death says that the kernel has taken the process away (a call may
    # even be answered between kill and signal): wait for the very process.
    _wait_for_end(int(handle.arena.path.split("/")[2]))
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(tier.handle.remote())
    with pytest.raises(TierError, match="is gone"):
        handle.attach()


def _wait_for_end(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)
