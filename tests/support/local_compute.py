"""Compute alone, driven through the step graph without Ray; torch.optim.AdamW stands for the optimizer actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.compute import Compute, ComputeSettings
from pipeline.families import load_model_spec, model_layout
from pipeline.messages import Batch, LossSum, StepControl, StepResult
from pipeline.schedule import SchedulePlan, build_evaluation, build_step
from pipeline.step.operations import Op
from pipeline.updates.learning_rate import LearningRate
from tiers.arena_map import ArenaMap, Extent, LayerHome, TierPlan
from tiers.initialise import initialise_layer
from tiers.layout import ElementType, Precision
from tiers.parameter_tier import ParameterTier

LR = LearningRate("constant", 1e-3, 0, 100)


class LocalCompute:
    """A tier with every layer in RAM and a compute engine, in this process. fp32 only."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        max_grad_norm: float | None = 1.0,
        activation_bytes: int = 0,
        device_gradients: int = 0,
        seed: int = 1,
        **settings: Any,
    ) -> None:
        self.spec = load_model_spec(config, Precision.FP32)
        model = model_layout(self.spec)
        first_held = len(model.layers) - device_gradients
        homes = tuple(
            LayerHome(gradient_slot=layer.index, gradient_on_device=layer.index >= first_held) for layer in model.layers
        )
        self.plan = TierPlan(model, homes, ElementType.FLOAT32, activation_bytes, settings.get("waves", 1) > 1)
        self.tier = ParameterTier(self.plan)
        self.settings = ComputeSettings(LR, max_grad_norm, **settings)
        self.schedule = SchedulePlan(
            tuple(layer.kind for layer in model.layers),
            model.tied,
            max_grad_norm is not None,
            self.settings.decoder_slots,
            self.settings.outgoing_buffers,
            device_gradients=tuple(home.gradient_on_device for home in homes),
            boundary_every=self.settings.boundary_every,
            waves=self.settings.waves,
        )
        self.arena, self.map = self.tier.handle().attach()
        for layer in model.layers:
            initialise_layer(self.arena, ArenaMap.of(self.plan), layer, seed)
        self.compute = Compute(self.spec, self.tier.handle(), self.settings)
        self.control = StepControl(applied=True, applied_steps=0, lr=0.0, clip_coefficient=1.0)
        self.parameters = {name: torch.nn.Parameter(view) for name, view in self._tensors(self.map.weights).items()}
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        others = [p for p in self.parameters.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            foreach=False,
        )

    def _tensors(self, extents: tuple[Extent, ...]) -> dict[str, torch.Tensor]:
        return {
            tensor.name: torch.from_numpy(self.arena.view(extent))[tensor.offset : tensor.offset + tensor.numel].view(
                tensor.shape
            )
            for layer, extent in zip(self.plan.model.layers, extents, strict=True)
            for tensor in layer.tensors
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of every weight, by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """A copy of every gradient of the last step, by name, not clipped."""
        return {name: view.clone() for name, view in self._tensors(self.map.gradients).items()}

    def moments_and_weights(self) -> bytes:
        """Bits of everything that a step which is not applied must leave alone."""
        extents = (extent for state in self.map.states for extent in state.values())
        return b"".join(self.arena.view(extent).tobytes() for extent in extents)

    def step(self, step: int, batch: Batch) -> StepResult:
        """Run one step in the order of submission and apply it."""
        result: StepResult | None = None
        compute = self.compute
        for operation in build_step(self.schedule):
            layer, slot = operation.key.layer, operation.slot
            match operation.key.op:
                case Op.BEGIN:
                    compute.begin(step, batch)
                case Op.STAGE:
                    compute.stage(step, layer, slot)
                case Op.FORWARD:
                    compute.forward(step, layer, slot)
                case Op.HEAD:
                    compute.head(step, slot)
                case Op.BACKWARD:
                    compute.backward(step, layer, slot)
                case Op.RECOMPUTE:
                    compute.recompute(step, layer, slot)
                case Op.STORE_SUM:
                    compute.store_sum(step, layer)
                case Op.FETCH_SUM:
                    compute.fetch_sum(step, layer)
                case Op.OFFLOAD:
                    compute.offload(step, layer)
                case Op.LOSS:
                    self.control = compute.loss(step, self.control)
                case Op.NORM:
                    self.control, result = compute.norm(step, self.control)
        assert result is not None
        self._update()
        return result

    def evaluate(self, step: int, batch: Batch) -> LossSum:
        """Run one evaluation pass."""
        for operation in build_evaluation(self.schedule):
            layer, slot = operation.key.layer, operation.slot
            match operation.key.op:
                case Op.BEGIN:
                    self.compute.begin(step, batch)
                case Op.STAGE:
                    self.compute.stage(step, layer, slot)
                case Op.FORWARD:
                    self.compute.forward(step, layer, slot)
                case Op.EVALUATE:
                    return self.compute.evaluate_head(step, slot)
        raise AssertionError("an evaluation without its end")

    def _update(self) -> None:
        if not self.control.applied:
            return
        gradients = self._tensors(self.map.gradients)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name] * self.control.clip_coefficient
        for group in self.optimizer.param_groups:
            group["lr"] = self.control.lr
        self.optimizer.step()

    def close(self) -> None:
        self.compute.close()
        self.arena.close()
        self.tier.close()


@contextmanager
def local_compute(config: dict[str, Any], **options: Any) -> Iterator[LocalCompute]:
    """A LocalCompute that is closed at the end."""
    run = LocalCompute(config, **options)
    try:
        yield run
    finally:
        run.close()
