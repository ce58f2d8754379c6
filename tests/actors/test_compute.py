"""Compute as a plain class and as a Ray actor with lanes."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import ray
import torch

from pipeline.compute import ComputeActor, ComputeSettings
from pipeline.compute.settings import ComputeSettings as SettingsOfDriver
from pipeline.errors import DeviceMemoryError, TokenIdError
from pipeline.messages import Batch, Lane, StepControl, StepResult
from pipeline.schedule import build_step
from pipeline.step.operations import Op
from support.local_compute import LocalCompute, local_compute
from support.tiny import VOCABULARY, random_batch, tiny_config


def with_id(batch: Batch, field: str, value: int) -> Batch:
    ids = getattr(batch, field).copy()
    ids[1, 0, 7] = value
    return dataclasses.replace(batch, **{field: ids})


@pytest.mark.parametrize("value", [VOCABULARY, VOCABULARY + 1, -1])
@pytest.mark.parametrize(("field", "what"), [("input_ids", "input id"), ("targets", "target")])
def test_an_id_outside_the_vocabulary_is_refused_by_name_and_the_engine_stays_usable(
    field: str, what: str, value: int
) -> None:
    batch = random_batch(1)
    with local_compute(tiny_config("llama")) as run:
        with pytest.raises(TokenIdError, match=f"{what} {value} at micro-batch 1, sequence 0, position 7 .1 such"):
            run.compute.begin(1, with_id(batch, field, value))
        assert math.isfinite(run.step(1, batch).loss)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_that_is_not_finite_is_not_applied(bad: float, max_grad_norm: float | None) -> None:
    with local_compute(tiny_config("llama"), max_grad_norm=max_grad_norm) as run:
        weight = run.parameters["model.layers.2.mlp.up_proj.weight"].detach()
        good = weight[3, 3].item()
        weight[3, 3] = bad
        before = run.moments_and_weights()
        result = run.step(1, random_batch(1))
        assert not result.control.applied and result.control.applied_steps == 0
        assert not math.isfinite(result.loss) and result.non_finite == "loss"
        assert run.moments_and_weights() == before
        weight[3, 3] = good
        result = run.step(2, random_batch(1))
        assert result.control.applied and result.control.applied_steps == 1 and result.non_finite is None


def test_a_bad_gradient_under_a_finite_loss_is_not_applied_and_its_layer_named() -> None:
    with local_compute(tiny_config("llama")) as run:
        compute, accumulator = run.compute, run.compute._passes.accumulators.of(run.plan.model.layers[3])
        batch, before = random_batch(1), run.moments_and_weights()
        for operation in build_step(run.schedule):
            key = operation.key
            if key.op is Op.BEGIN:
                compute.begin(1, batch)
            if key.op in (Op.BEGIN, Op.NORM, Op.UPDATE):
                continue
            if key.op is Op.BACKWARD and key.layer == 3:
                accumulator[5] = math.inf
            arguments = {Op.HEAD: (operation.slot,), Op.OFFLOAD: (key.layer,)}.get(key.op, (key.layer, operation.slot))
            getattr(compute, key.op.value)(1, *arguments)
        control, result = compute.norm(1, run.control)
        assert not control.applied and result.control == control
        assert math.isfinite(result.loss) and math.isinf(result.grad_norm)
        assert result.non_finite == run.plan.model.layers[3].name
        assert run.moments_and_weights() == before


def test_repeated_steps_give_the_same_bits() -> None:
    batch = random_batch(4, packed=True)
    with local_compute(tiny_config("qwen2", tied=True), max_grad_norm=None) as run:
        seen = set()
        for step in range(1, 21):
            run.optimizer.zero_grad()
            for group in run.optimizer.param_groups:
                group["weight_decay"] = 0.0
            weights = {name: value.clone() for name, value in run.weights().items()}
            result = run.step(step, batch)
            gradients = b"".join(gradient.numpy().tobytes() for gradient in run.gradients().values())
            seen.add((result.loss, result.grad_norm, gradients))
            with torch.no_grad():
                for name, parameter in run.parameters.items():
                    parameter.copy_(weights[name])
        assert len(seen) == 1


def test_two_steps_in_flight_do_not_mix() -> None:
    first, second = random_batch(1, packed=True), random_batch(2, packed=True)
    with local_compute(tiny_config("llama")) as run:
        alone = run.step(1, first)
    with local_compute(tiny_config("llama")) as run:
        begin = run.compute.begin

        def begin_both(step: int, batch: Batch, *after: object) -> None:
            begin(step, batch, *after)
            begin(step + 1, second, *after)
            for layer in (0, 1):
                run.compute.stage(step + 1, layer, run.schedule.device_slot(layer))
                run.compute.forward(step + 1, layer, run.schedule.device_slot(layer))

        run.compute.begin = begin_both  # type: ignore[method-assign]
        assert run.step(1, first) == alone


def test_a_step_keeps_nothing_once_it_is_over() -> None:
    with local_compute(tiny_config("llama")) as run:
        run.step(1, random_batch(1))
        run.evaluate(-1, random_batch(2))
        assert not run.compute._passes.steps._states
        assert not run.compute._passes._boundaries._kept


def test_spans_name_every_device_operation_of_a_step() -> None:
    with local_compute(tiny_config("llama")) as run:
        run.step(1, random_batch(1))
        spans = run.compute.take_spans()
        assert not run.compute.take_spans()
    assert all(span.start_s <= span.end_s and span.actor == "compute" for span in spans)
    names = [span.name for span in spans if span.lane is Lane.COMPUTE]
    depth = 5
    assert names == [
        *(f"forward[{layer}]" for layer in range(depth + 1)),
        "head",
        *(f"backward[{layer}]" for layer in range(depth, -1, -1)),
    ]
    assert {span.name for span in spans if span.lane is Lane.D2H} == {f"offload[{layer}]" for layer in range(depth + 2)}
    copied = [span for span in spans if span.lane is Lane.H2D]
    assert all(span.num_bytes > 0 for span in copied) and len(copied) > depth + 2


def test_device_memory_taken_for_good_does_not_depend_on_depth() -> None:
    taken = []
    for depth in (3, 6):
        with local_compute(tiny_config("llama", num_hidden_layers=depth)) as run:
            taken.append(run.compute.ready())
    assert taken[0] == taken[1] > 0


@pytest.mark.parametrize(
    "options",
    [
        *({"device": "tpu"}, {"decoder_slots": 0}, {"outgoing_buffers": 0}, {"max_grad_norm": 0.0}, {"threads": -1}),
        *({"waves": 0}, {"boundary_every": 0}),
    ],
    ids=str,
)
def test_senseless_settings_are_refused(options: dict[str, Any]) -> None:
    with local_compute(tiny_config("llama")) as run:
        fields = {"learning_rate": run.settings.learning_rate, "max_grad_norm": 1.0, **options}
    with pytest.raises(ValueError, match=next(iter(options))):
        ComputeSettings(**fields)


def test_errors_and_settings_travel_between_processes() -> None:
    for error in (TokenIdError("id 97"), DeviceMemoryError("none left")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert ComputeSettings is SettingsOfDriver


def submit(run: LocalCompute, actor: Any, step: int, batch: Batch) -> StepResult:
    """One step as Ray calls whose dependencies are refs; the arena's weights stay as they are."""
    refs: dict[Any, Any] = {}
    control = ray.put(StepControl(True, 0, 0.0, 1.0))
    result = None
    for operation in build_step(run.schedule):
        key, slot = operation.key, operation.slot
        if key.op is Op.UPDATE:
            continue
        after = [refs[needed] for needed in operation.after]
        match key.op:
            case Op.BEGIN:
                refs[key] = actor.begin.remote(step, batch, *after)
            case Op.HEAD:
                refs[key] = actor.head.remote(step, slot, *after)
            case Op.OFFLOAD:
                refs[key] = actor.offload.remote(step, key.layer, *after)
            case Op.NORM:
                refs[key], result = actor.norm.remote(step, control, *after)
            case _:
                refs[key] = getattr(actor, key.op.value).remote(step, key.layer, slot, *after)
    ray.get(list(refs.values()), timeout=120)
    found: StepResult = ray.get(result)
    return found


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_the_actor_does_what_the_class_does_bit_for_bit_and_survives_a_bad_batch() -> None:
    batch = random_batch(6, micro_batches=3, packed=True)
    with local_compute(tiny_config("qwen2", tied=True)) as run:
        actor = ComputeActor.options(num_cpus=0).remote(run.spec, run.tier.handle(), run.settings)
        try:
            assert ray.get(actor.ready.remote(), timeout=120) == run.compute.ready()
            with pytest.raises(TokenIdError, match="input id 97"):
                ray.get(actor.begin.remote(1, with_id(batch, "input_ids", VOCABULARY)), timeout=60)
            remote = submit(run, actor, 1, batch)
            through_actor = run.gradients()
            for view in run._tensors(run.map.gradients).values():
                view.fill_(math.nan)
            again = submit(run, actor, 2, batch)
            assert again == remote
        finally:
            ray.kill(actor)
        local = run.step(1, batch)
        # This process may have compiled something for another test.
        assert dataclasses.replace(remote, compiled_graphs=local.compiled_graphs) == local
        for name, gradient in run.gradients().items():
            np.testing.assert_array_equal(gradient, through_actor[name], err_msg=name)
