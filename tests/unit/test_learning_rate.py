from __future__ import annotations

import math
from typing import get_args

import pytest

from pipeline.updates.learning_rate import LearningRate, ScheduleKind


def test_first_step_of_warm_up_learns_and_the_last_reaches_the_base() -> None:
    rate = LearningRate("constant", base=1e-3, warmup_steps=10, total_steps=100)
    assert rate.at(1) == pytest.approx(1e-4)
    assert rate.at(10) == 1e-3
    assert rate.at(11) == 1e-3


def test_cosine_over_ten_steps_has_ten_falling_values_from_base() -> None:
    rate = LearningRate("cosine", base=1.0, warmup_steps=0, total_steps=10)
    values = [rate.at(step) for step in range(1, 11)]
    assert values[0] == 1.0
    assert values == sorted(set(values), reverse=True)
    assert values[-1] > 0
    assert values == [pytest.approx(0.5 * (1 + math.cos(math.pi * k / 10))) for k in range(10)]


def test_linear_falls_evenly_towards_the_final_ratio() -> None:
    rate = LearningRate("linear", base=2.0, warmup_steps=2, total_steps=6, final_ratio=0.5)
    assert [rate.at(step) for step in range(1, 9)] == [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_wsd_is_stable_until_the_decay() -> None:
    rate = LearningRate("wsd", base=1.0, warmup_steps=1, total_steps=8, decay_steps=4)
    assert [rate.at(step) for step in range(1, 10)] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_rate_depends_on_the_step_alone(kind: ScheduleKind) -> None:
    rate = LearningRate(kind, base=1.0, warmup_steps=3, total_steps=20, final_ratio=0.1, decay_steps=5)
    forwards = [rate.at(step) for step in range(1, 21)]
    assert [rate.at(step) for step in range(20, 0, -1)] == forwards[::-1]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_may_take_the_whole_run(kind: ScheduleKind) -> None:
    rate = LearningRate(kind, base=1.0, warmup_steps=4, total_steps=4)
    assert rate.at(4) == 1.0
    assert rate.at(5) in (0.0, 1.0)


@pytest.mark.parametrize("step", [0, -1])
def test_refuses_steps_below_one(step: int) -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        LearningRate("constant", 1.0, 0, 1).at(step)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (lambda: LearningRate("cosine", 1.0, 11, 10), "0 to 10 steps"),
        (lambda: LearningRate("cosine", math.nan, 0, 10), "finite"),
        (lambda: LearningRate("cosine", 1.0, 0, 10, final_ratio=2.0), "0 to 1"),
        (lambda: LearningRate("wsd", 1.0, 8, 10, decay_steps=5), "1 to 2 steps"),
    ],
)
def test_refuses_impossible_schedules(rate: object, message: str) -> None:
    assert callable(rate)
    with pytest.raises(ValueError, match=message):
        rate()
