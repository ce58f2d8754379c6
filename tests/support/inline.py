"""Runs the step graph in one process with the plain classes behind the actors: no Ray, one operation after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.compute import Compute, ComputeSettings
from pipeline.families import ModelSpec, load_model_spec, model_layout
from pipeline.memory.homes import homes
from pipeline.messages import Batch, StepControl, StepResult
from pipeline.schedule import SchedulePlan, build_step
from pipeline.step.operations import Key, Op
from pipeline.updates.learning_rate import LearningRate
from pipeline.updates.optimizer_pool import Optimizer, OptimizerSettings
from tiers.arena_map import TierPlan
from tiers.layout import Buffer, ElementType, Precision
from tiers.master import join_master
from tiers.parameter_tier import ParameterTier, TierHandle
from tiers.prefetcher import Prefetcher
from tiers.shards import FileRecord
from tiers.store_metadata import Compression

LR = LearningRate("constant", 1e-3, 0, 100)


@dataclass(frozen=True)
class Case:
    """One way to run the pipeline; every field but the first five must leave the result bitwise as it is."""

    config: dict[str, Any]
    precision: Precision = Precision.FP32
    max_grad_norm: float | None = 1.0
    lr: LearningRate = LR
    gradients: ElementType | None = None
    optimizer_actors: int = 1
    threads: int = 1
    decoder_slots: int = 2
    state_on_nvme: tuple[int, ...] = ()
    weights_on_nvme: tuple[int, ...] = ()
    staging_slots: int = 2
    nvme_dir: Path | None = None
    head_chunk_tokens: int = 4096
    outgoing_buffers: int = 2
    activation_bytes: int = 0
    device_gradients: int = 0
    device_updates: tuple[int, ...] = ()
    kept_layers: int = 0
    own_slots: int = 0
    boundary_every: int = 1
    waves: int = 1
    in_lent_room: int = 0
    io_threads: int = 2
    compression: Compression = Compression.NONE
    staging_bytes: int = 0

    def spec(self) -> ModelSpec:
        return load_model_spec(self.config, self.precision)

    def plans(self) -> tuple[TierPlan, SchedulePlan]:
        model = model_layout(self.spec())
        clip = self.max_grad_norm is not None
        placed = homes(
            model,
            clip=clip or self.waves > 1,
            state=self.state_on_nvme,
            weights=self.weights_on_nvme,
            staging_slots=self.staging_slots,
            device_gradients=self.device_gradients,
        )
        default = ElementType.FLOAT32 if self.precision is Precision.FP32 else ElementType.BFLOAT16
        schedule = SchedulePlan(
            kinds=tuple(layer.kind for layer in model.layers),
            tied=model.tied,
            clip=clip,
            decoder_slots=self.decoder_slots,
            outgoing_buffers=self.outgoing_buffers,
            weight_slots=tuple(home.weight_slot for home in placed),
            state_slots=tuple(home.state_slot for home in placed),
            gradient_slots=tuple(home.gradient_slot for home in placed),
            gradient_spans=tuple(home.gradient_span for home in placed),
            device_gradients=tuple(home.gradient_on_device for home in placed),
            device_updates=self.device_updates,
            kept_layers=self.kept_layers,
            own_slots=self.own_slots,
            boundary_every=self.boundary_every,
            waves=self.waves,
            in_lent_room=self.in_lent_room,
        )
        return TierPlan(model, placed, self.gradients or default, self.activation_bytes, self.waves > 1), schedule

    def compute_settings(self) -> ComputeSettings:
        return ComputeSettings(
            device="cpu",
            decoder_slots=self.decoder_slots,
            outgoing_buffers=self.outgoing_buffers,
            compile=False,
            max_grad_norm=self.max_grad_norm,
            learning_rate=self.lr,
            head_chunk_tokens=self.head_chunk_tokens,
            device_updates=self.device_updates,
            kept_layers=self.kept_layers,
            own_slots=self.own_slots,
            boundary_every=self.boundary_every,
            waves=self.waves,
            optimizer=self.optimizer_settings(),
        )

    def optimizer_settings(self) -> OptimizerSettings:
        return OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class InlineRun:
    """A tier, a prefetcher, optimizers and a compute engine in this process."""

    def __init__(self, case: Case) -> None:
        self.case = case
        tier_plan, self.schedule = case.plans()
        self.tier = ParameterTier(tier_plan)
        handle: TierHandle = self.tier.handle()
        self.prefetcher = Prefetcher(
            handle,
            nvme_dir=case.nvme_dir,
            threads=case.io_threads,
            compression=case.compression,
            staging_bytes=case.staging_bytes,
        )
        self.writers = ThreadPoolExecutor(4)
        self.may_write = threading.Event()
        self.may_write.set()
        self.snapshots: dict[int, Future[tuple[FileRecord, ...]]] = {}
        """By layer: the writing of the newest checkpoint."""
        self._checkpoint: Path | None = None
        """Of the step before."""
        self.optimizers = [
            Optimizer(handle, case.optimizer_settings(), part, case.optimizer_actors, case.threads)
            for part in range(case.optimizer_actors)
        ]
        self.compute = Compute(case.spec(), handle, case.compute_settings())
        self.control = StepControl(applied=True, applied_steps=0, lr=0.0, clip_coefficient=1.0)
        self.arena, self.map = handle.attach()

    def initialise(self, seed: int) -> None:
        for layer in range(self.schedule.num_layers):
            self.prefetcher.initialise(layer, seed)

    def step(self, step: int, batch: Batch, checkpoint: Path | None = None) -> StepResult:
        """Run one step in submission order; a checkpoint is written in threads beside it and the next."""
        result: StepResult | None = None
        captured, self._checkpoint = self._checkpoint, checkpoint
        for operation in build_step(self.schedule, checkpoint=checkpoint is not None, captures=captured is not None):
            layer, slot = operation.key.layer, operation.slot
            if captured is not None and Key(Op.SNAPSHOT, layer) in operation.after_last:
                self.snapshots[layer].result()
            match operation.key.op:
                case Op.BEGIN:
                    self.compute.begin(step, batch)
                case Op.STAGE:
                    self.compute.stage(step, layer, slot)
                case Op.FORWARD:
                    self.compute.forward(step, layer, slot)
                case Op.HEAD:
                    self.compute.head(step, slot)
                case Op.RECOMPUTE:
                    self.compute.recompute(step, layer, slot)
                case Op.BACKWARD:
                    self.compute.backward(step, layer, slot)
                case Op.OFFLOAD:
                    self.compute.offload(step, layer)
                case Op.STORE_SUM:
                    self.compute.store_sum(step, layer)
                case Op.FETCH_SUM:
                    self.compute.fetch_sum(step, layer)
                case Op.LEND_STATE:
                    self.compute.lend_state(step, layer)
                case Op.UPDATE_ON_DEVICE:
                    self.compute.update_on_device(step, layer, slot, self.control)
                case Op.RETURN_STATE:
                    self.compute.return_state(step, layer, slot)
                case Op.LOSS:
                    self.control = self.compute.loss(step, self.control)
                case Op.NORM:
                    control, result = self.compute.norm(step, self.control)
                    self.control = control
                case Op.UPDATE:
                    for optimizer in self.optimizers:
                        optimizer.update(step, layer, self.control)
                case Op.LOAD_WEIGHTS:
                    self.prefetcher.load_weights(layer)
                case Op.LOAD_STATE:
                    self.prefetcher.load_state(layer)
                case Op.STORE_STATE:
                    self.prefetcher.store_state(layer)
                case Op.SNAPSHOT:
                    assert checkpoint is not None
                    self.snapshots[layer] = self.writers.submit(self._snapshot, layer, checkpoint)
                case Op.CAPTURE:
                    assert captured is not None
                    self.prefetcher.capture(layer, captured)
        assert result is not None
        return result

    def _snapshot(self, layer: int, checkpoint: Path) -> tuple[FileRecord, ...]:
        self.may_write.wait()
        return self.prefetcher.snapshot(layer, checkpoint)

    def train(self, batches: Sequence[Batch]) -> list[StepResult]:
        return [self.step(step, batch) for step, batch in enumerate(batches, 1)]

    def weights(self) -> dict[str, torch.Tensor]:
        """The fp32 master of every tensor, by name."""
        found: dict[str, torch.Tensor] = {}
        for layer in self.map.plan.model.layers:
            if self.map.plan.homes[layer.index].state_slot is not None:
                self.prefetcher.load_state(layer.index)
            state = self.map.states[layer.index]
            flat = self.arena.view(state[Buffer.WEIGHT])
            if self.case.precision is Precision.BF16:
                flat = join_master(flat, self.arena.view(state[Buffer.WEIGHT_LOW]))
            for tensor in layer.tensors:
                values = np.array(flat[tensor.offset : tensor.offset + tensor.numel])
                found[tensor.name] = torch.from_numpy(values).view(tensor.shape)
            if self.map.plan.homes[layer.index].state_slot is not None:
                self.prefetcher.release_state(layer.index)
        return found

    def close(self) -> None:
        self.may_write.set()
        self.writers.shutdown()
        self.compute.close()
        for optimizer in self.optimizers:
            optimizer.close()
        self.prefetcher.close()
        self.arena.close()
        self.tier.close()


@contextmanager
def inline_run(case: Case, seed: int = 1) -> Iterator[InlineRun]:
    """A run with randomly initialised weights."""
    run = InlineRun(case)
    try:
        run.initialise(seed)
        yield run
    finally:
        run.close()
