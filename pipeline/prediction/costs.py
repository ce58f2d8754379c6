"""What each operation of a step costs on a described machine: bytes over bandwidth, arithmetic over rate. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.memory.placement_request import Placement
from pipeline.memory.shapes import ComputeShape, StepShape
from pipeline.messages import Lane
from pipeline.prediction.device_costs import DeviceCosts
from pipeline.prediction.hardware import Hardware
from pipeline.step.operations import Key, Op, Pass
from tiers.layout import Buffer, LayerKind, LayerLayout, buffer_types, state_buffers

CALL_S = 1e-3
"""From the end of an operation that returns late to the start of its follower on another actor (measured 0.5 to 1)."""

SUM_BYTES = 4
"""An element of a gradient's sum that waits for the next wave."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Time on one lane."""

    lane: Lane
    alone_s: float
    """While the lanes that share its path are idle."""
    busy_s: float
    """While one of them works."""
    num_bytes: int = 0


RIVALS: dict[Lane, frozenset[Lane]] = {
    Lane.H2D: frozenset({Lane.D2H}),
    Lane.D2H: frozenset({Lane.H2D}),
    Lane.UPDATE: frozenset({Lane.H2D, Lane.D2H, Lane.COMPUTE}),
    Lane.NVME_READ: frozenset({Lane.NVME_WRITE}),
    Lane.NVME_WRITE: frozenset({Lane.NVME_READ}),
    Lane.COMPUTE: frozenset(),
}
"""Lanes that take bandwidth from a lane. While the device computes, DMA comes and goes too often to tell apart."""


@dataclass(frozen=True)
class CostModel:
    """Prices the operations of one placement on one machine."""

    placement: Placement
    compute: ComputeShape
    step: StepShape
    hardware: Hardware

    def cost(self, key: Key) -> Cost | None:
        """Price of an operation; None where it takes no lane's time (the step's start, loss and norm)."""
        model, schedule = self.placement.tier.model, self.placement.schedule
        first_pass = key.pass_ is Pass.FORWARD and key.wave == 0
        layer = model.layers[key.layer] if key.layer >= 0 else self._head
        types = buffer_types(model.precision, self.placement.tier.gradient_type)
        link, host = self.hardware.link, self.hardware.host
        weight_bytes = self._weight_bytes(layer)
        state_bytes = layer.numel * sum(types[buffer].bytes for buffer in state_buffers(model.precision))
        match key.op:
            case Op.STAGE if first_pass and key.layer in schedule.device_updates:
                return None
            case Op.LEND_STATE:
                return _transfer(Lane.H2D, state_bytes, link.to_device_gbps, link.both_ways_gbps)
            case Op.RETURN_STATE:
                return _transfer(Lane.D2H, state_bytes + weight_bytes, link.to_host_gbps, link.both_ways_gbps)
            case Op.UPDATE_ON_DEVICE:
                moved = 2 * (state_bytes + weight_bytes) + layer.numel * types[Buffer.GRADIENT].bytes
                seconds = moved / self.hardware.device.memory_gbps / 1e9
                return Cost(Lane.COMPUTE, seconds, seconds)
            case Op.STAGE:
                fetched = self._spilled_bytes(layer) if self._brings_inputs(key) else 0
                return _transfer(Lane.H2D, weight_bytes + fetched, link.to_device_gbps, link.both_ways_gbps)
            case Op.OFFLOAD:
                num_bytes = layer.numel * types[Buffer.GRADIENT].bytes
                return _transfer(Lane.D2H, num_bytes, link.to_host_gbps, link.both_ways_gbps)
            case Op.STORE_SUM:
                return _transfer(Lane.D2H, layer.numel * SUM_BYTES, link.to_host_gbps, link.both_ways_gbps)
            case Op.FETCH_SUM:
                return _transfer(Lane.H2D, layer.numel * SUM_BYTES, link.to_device_gbps, link.both_ways_gbps)
            case Op.FORWARD | Op.RECOMPUTE | Op.HEAD | Op.BACKWARD:
                return self._device(key, layer)
            case Op.UPDATE:
                alone = layer.numel / host.update_gparams_per_s / 1e9
                return Cost(Lane.UPDATE, alone, layer.numel / host.update_busy_gparams_per_s / 1e9)
            case Op.LOAD_WEIGHTS:
                return self._nvme(Lane.NVME_READ, weight_bytes)
            case Op.LOAD_STATE | Op.STORE_STATE:
                num_bytes = self.state_bytes(layer)
                return self._nvme(Lane.NVME_READ if key.op is Op.LOAD_STATE else Lane.NVME_WRITE, num_bytes)
            case _:
                return None

    def state_bytes(self, layer: LayerLayout) -> int:
        """Bytes that an update of a layer on NVMe reads, and writes: its state, and its weights if they are there."""
        precision = self.placement.tier.model.precision
        types = buffer_types(precision)
        element = sum(types[buffer].bytes for buffer in state_buffers(precision))
        if self.placement.tier.homes[layer.index].weight_slot is not None:
            element += types[Buffer.WEIGHT].bytes
        return layer.numel * element

    def model_flops(self) -> float:
        """Of a step, forward and backward, recompute not counted: 6 x matmul parameters x tokens, and attention."""
        layers, costs = self.placement.tier.model.layers, self._device_costs(self.step)
        decoders = [layer for layer in layers if layer.kind is LayerKind.DECODER]
        return 3.0 * (sum(costs.forward_flops(layer) for layer in decoders) + costs.head_flops())

    @property
    def _head(self) -> LayerLayout:
        return self.placement.tier.model.layers[-1]

    def _device(self, key: Key, layer: LayerLayout) -> Cost:
        schedule = self.placement.schedule
        # The embedding's backward takes the whole step at once.
        whole = key.op is Op.BACKWARD and layer.kind is LayerKind.EMBEDDING
        step = self.step if whole else self.step.in_wave(key.wave, schedule.waves)
        leaves = key.wave == schedule.waves - 1
        kept = layer.index > schedule.groups.recomputed
        seconds = self._device_costs(step).seconds(key.op, layer, kept=kept, leaves=leaves)
        if key.op is Op.FORWARD and (spilled := self._spilled_bytes(layer)):
            # Leaves on the D2H stream beside the next layer's work; the slower of the two sets the pace.
            seconds = max(seconds, spilled / self.hardware.link.to_host_gbps / 1e9)
        return Cost(Lane.COMPUTE, seconds, seconds)

    def _device_costs(self, step: StepShape) -> DeviceCosts:
        weight_bytes = buffer_types(self.placement.tier.model.precision)[Buffer.WEIGHT].bytes
        chunk = self.placement.mlp_chunk_tokens
        return DeviceCosts(self.compute, step, self.hardware.device, weight_bytes, chunk)

    def _weight_bytes(self, layer: LayerLayout) -> int:
        return layer.numel * buffer_types(self.placement.tier.model.precision)[Buffer.WEIGHT].bytes

    def _spilled_bytes(self, layer: LayerLayout) -> int:
        """Boundary activations of a layer that cross to pinned RAM and back."""
        rank, spilled = self.placement.schedule.groups.rank(layer.index), self.placement.spilled_boundaries
        return self.placement.tier.activation_bytes // spilled if rank is not None and rank < spilled else 0

    def _brings_inputs(self, key: Key) -> bool:
        """Whether a layer's spilled inputs come back with its weights: for the first that its group is read for."""
        groups = self.placement.schedule.groups
        if key.pass_ is Pass.FORWARD or groups.rank(key.layer) is None:
            return False
        made_again = key.layer in groups.made_again(groups.group(key.layer)[-1])
        return key.pass_ is (Pass.RECOMPUTE if made_again else Pass.BACKWARD)

    def _nvme(self, lane: Lane, num_bytes: int) -> Cost:
        nvme = self.hardware.nvme
        assert nvme is not None, "a placement on NVMe needs a machine with a drive"
        if lane is Lane.NVME_READ:
            return _transfer(lane, num_bytes, nvme.read_gbps, nvme.read_busy_gbps)
        return _transfer(lane, num_bytes, nvme.write_gbps, nvme.write_busy_gbps)


def _transfer(lane: Lane, num_bytes: int, alone_gbps: float, busy_gbps: float) -> Cost:
    return Cost(lane, num_bytes / alone_gbps / 1e9, num_bytes / busy_gbps / 1e9, num_bytes)
