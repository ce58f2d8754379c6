"""The Ray actors, with two steps in flight, leave the bits that the same parts leave when called one after another.

Two checkpoints are compared: one whose snapshots are taken while two more steps run, and one of the end.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from pipeline.coordinator import Coordinator, SubmittedStep
from pipeline.crew import Crew, CrewSettings
from pipeline.errors import TokenIdError
from pipeline.messages import StepResult
from pipeline.schedule import SchedulePlan
from support.inline import Case, inline_run
from support.stores import saved_facts
from support.tiny import random_batch, tiny_config
from tasks.stored_model import StoredModel
from tiers.checkpoint import CheckpointWriter, begin
from tiers.errors import ShardError
from tiers.layout import ModelLayout, Precision
from tiers.shards import FileRecord

STEPS, SNAPSHOT_STEP = 10, 8
LAYERS = tuple(range(7))
BATCHES = [random_batch(step, packed=True) for step in range(1, STEPS + 1)]

Weights = dict[str, torch.Tensor]
Outcome = tuple[list[StepResult], Weights, Weights]
"""Results of the steps, the master after SNAPSHOT_STEP and at the end."""


def inline_outcome(case: Case) -> Outcome:
    with inline_run(case) as run:
        results = run.train(BATCHES[:SNAPSHOT_STEP])
        middle = run.weights()
        results += [run.step(step, BATCHES[step - 1]) for step in range(SNAPSHOT_STEP + 1, STEPS + 1)]
        return results, middle, run.weights()


def ray_outcome(case: Case, directory: Path) -> Outcome:
    with crew_of(case) as (crew, schedule, model):
        coordinator = Coordinator(crew, schedule, applied_steps=0)
        writer = begin(directory, SNAPSHOT_STEP, model)
        results: list[StepResult] = []
        in_flight: deque[SubmittedStep] = deque()
        for step, batch in enumerate(BATCHES, 1):
            if len(in_flight) == 2:
                results.append(coordinator.wait(in_flight.popleft()))
            in_flight.append(coordinator.submit(step, batch, writer.directory if step == SNAPSHOT_STEP else None))
            if step == SNAPSHOT_STEP:
                snapshots = in_flight[-1].snapshots
        results += [coordinator.wait(submitted) for submitted in in_flight]
        middle = published(writer, [record for records in ray.get(snapshots) for record in records], model)
        writer = begin(directory, STEPS, model)
        return results, middle, published(writer, coordinator.snapshot(writer.directory), model)


@contextmanager
def crew_of(case: Case) -> Iterator[tuple[Crew, SchedulePlan, ModelLayout]]:
    """The actors of a run with randomly initialised weights."""
    tier_plan, schedule = case.plans()
    settings = CrewSettings(case.optimizer_actors, case.threads, 2, None, case.nvme_dir)
    compute, optimizer = case.compute_settings(), case.optimizer_settings()
    with Crew.start(case.spec(), tier_plan, compute, optimizer, settings, "equivalence") as crew:
        ray.get([crew.prefetcher.initialise.remote(layer, 1) for layer in range(schedule.num_layers)])
        yield crew, schedule, tier_plan.model


def published(writer: CheckpointWriter, records: Sequence[FileRecord], model: ModelLayout) -> Weights:
    """The master of a checkpoint, read by plain zarr."""
    stored = StoredModel.open(writer.publish(records, saved_facts(model, STEPS)))
    return {tensor.name: stored.read(tensor, torch.float32) for tensor in stored.tensors}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_updates_on_the_device_and_kept_layers_leave_the_bits_of_plain_steps(tmp_path: Path) -> None:
    """An evaluation between steps takes the slots where the newest weights lie."""
    case = Case(tiny_config("qwen3"), Precision.BF16, 0.5)
    with_extras = replace(case, device_updates=(0, 1, 2), kept_layers=2)
    with crew_of(with_extras) as (crew, schedule, model):
        coordinator = Coordinator(crew, schedule, applied_steps=0)
        results: list[StepResult] = []
        for first in (1, SNAPSHOT_STEP + 1):
            steps = [(step, BATCHES[step - 1]) for step in range(first, STEPS + 1)][:SNAPSHOT_STEP]
            submitted = [coordinator.submit(step, batch) for step, batch in steps[:2]]
            for step, batch in steps[2:]:
                results.append(coordinator.wait(submitted[-2]))
                submitted.append(coordinator.submit(step, batch))
            results += [coordinator.wait(each) for each in submitted[-2:]]
            loss = coordinator.evaluate(iter(BATCHES[:1]))
            assert loss.supervised_tokens == BATCHES[0].supervised_tokens
        writer = begin(tmp_path, STEPS, model)
        weights = published(writer, coordinator.snapshot(writer.directory), model)
    expected, _, wanted = inline_outcome(case)
    assert [(r.loss, r.grad_norm) for r in results] == [(r.loss, r.grad_norm) for r in expected]
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(
    ("precision", "max_grad_norm", "nvme", "waves"),
    [(Precision.FP32, 0.5, False, 1), (Precision.BF16, None, True, 1), (Precision.BF16, 0.5, True, 2)],
    ids=["fp32-clipped", "bf16-unclipped-nvme", "bf16-clipped-nvme-waves"],
)
def test_actors_with_two_steps_in_flight_leave_the_inline_runs_bits(
    precision: Precision, max_grad_norm: float | None, nvme: bool, waves: int, tmp_path: Path
) -> None:
    case = Case(tiny_config("qwen3"), precision, max_grad_norm)
    spread = replace(case, optimizer_actors=2, waves=waves, boundary_every=waves)
    if nvme:
        spread = replace(spread, state_on_nvme=LAYERS, weights_on_nvme=LAYERS[:-1], nvme_dir=tmp_path)
    results, middle, end = ray_outcome(spread, tmp_path / "run")
    wanted_results, wanted_middle, wanted_end = inline_outcome(case)
    assert results == wanted_results
    for what, got, wanted in (("middle", middle, wanted_middle), ("end", end, wanted_end)):
        assert got.keys() == wanted.keys()
        apart = [
            name for name in wanted if not torch.equal(got[name].view(torch.int32), wanted[name].view(torch.int32))
        ]
        assert not apart, f"{what}: {apart} differ"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_local")
def test_a_fault_in_any_actor_reaches_the_driver_with_its_cause(tmp_path: Path) -> None:
    """B36, B78, B88: also one that no call of its own step waits for."""
    case = Case(tiny_config("llama"), state_on_nvme=LAYERS, nvme_dir=tmp_path)
    with crew_of(case) as (crew, schedule, _):
        coordinator = Coordinator(crew, schedule, applied_steps=0)
        bad = random_batch(1)
        bad.input_ids[0, 1, 3] = 97
        with pytest.raises(TokenIdError, match="input id 97 at micro-batch 0, sequence 1, position 3"):
            coordinator.wait(coordinator.submit(1, bad))

    # New actors, as after any fault: the failed step left state in slots that nothing stores.
    with crew_of(case) as (crew, schedule, _):
        coordinator = Coordinator(crew, schedule, applied_steps=0)
        coordinator.wait(coordinator.submit(2, BATCHES[0]))
        coordinator.drain()
        (file,) = tmp_path.glob("**/layer-0002/exp_avg/c/0")
        os.truncate(file, 4096)
        # Its updates wait for the norm: the result is known before the load fails, the next step's is not.
        coordinator.wait(coordinator.submit(3, BATCHES[1]))
        with pytest.raises(ShardError, match="layer-0002/exp_avg"):
            coordinator.wait(coordinator.submit(4, BATCHES[2]))
