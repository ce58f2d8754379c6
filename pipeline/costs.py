"""What each operation of a step costs on a described machine: bytes over bandwidth, arithmetic over rate. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.activation_bytes import HEAD_CHUNK_TOKENS
from pipeline.hardware import Hardware
from pipeline.messages import Lane
from pipeline.operations import Key, Op, Pass
from pipeline.placement_search import Placement
from pipeline.shapes import ComputeShape, StepShape
from tiers.layout import Buffer, LayerKind, LayerLayout, buffer_types, state_buffers

CALL_S = 1e-3
"""From the end of an operation that returns late to the start of its follower on another actor (measured 0.5 to 1)."""

KERNELS_S = 20e-6
"""Launches that one micro-batch of a layer leaves the device idle for."""

LOGIT_BYTES = 14
"""Device traffic a logit beside the products: written and read in bf16, exponentiated in fp32, its gradient twice."""


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
        model = self.placement.tier.model
        layer = model.layers[key.layer] if key.layer >= 0 else self._head
        types = buffer_types(model.precision, self.placement.tier.gradient_type)
        link, host = self.hardware.link, self.hardware.host
        weight_bytes = self._weight_bytes(layer)
        state_bytes = layer.numel * sum(types[buffer].bytes for buffer in state_buffers(model.precision))
        match key.op:
            case Op.STAGE if key.pass_ is Pass.FORWARD and key.layer in self.placement.schedule.device_updates:
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
                fetched = self._spilled_bytes(layer) if key.pass_ is Pass.BACKWARD else 0
                return _transfer(Lane.H2D, weight_bytes + fetched, link.to_device_gbps, link.both_ways_gbps)
            case Op.OFFLOAD:
                num_bytes = layer.numel * types[Buffer.GRADIENT].bytes
                return _transfer(Lane.D2H, num_bytes, link.to_host_gbps, link.both_ways_gbps)
            case Op.FORWARD | Op.HEAD | Op.BACKWARD:
                return self._device(key.op, layer)
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
        layers = self.placement.tier.model.layers
        decoders = [layer for layer in layers if layer.kind is LayerKind.DECODER]
        forward = sum(self._forward_flops(layer) for layer in decoders) + self._head_products
        return 3.0 * forward

    @property
    def _head(self) -> LayerLayout:
        return self.placement.tier.model.layers[-1]

    @property
    def _head_products(self) -> float:
        return 2.0 * self.compute.vocab_size * self.compute.hidden_size * self.step.tokens

    def _forward_flops(self, layer: LayerLayout) -> float:
        # Causal attention: two products over half the sequence, as the design counts it.
        keys = min(self.step.sequence_length, self.compute.attention_window or self.step.sequence_length)
        attention = 2.0 * keys * self.compute.query_size
        return (2.0 * self.compute.active_parameters(layer) + attention) * self.step.tokens

    @property
    def _left_out_flops(self) -> float:
        """Of a decoder layer's last projection, which a recompute leaves out."""
        compute = self.compute
        products = compute.experts_per_token * compute.intermediate_size * compute.hidden_size
        return 2.0 * products * self.step.tokens

    def _device(self, op: Op, layer: LayerLayout) -> Cost:
        traffic = self.hardware.device.memory_gbps * 1e9
        # A finished gradient is converted, measured and zeroed: 4 + 2 + 4 + 4 bytes an element.
        leaving_s = layer.numel * 14 / traffic
        activations = self.step.tokens * self.compute.hidden_size
        if op is Op.HEAD:
            seconds = self._head_s() + leaving_s
        elif layer.kind is LayerKind.EMBEDDING:
            seconds = activations * (4 if op is Op.FORWARD else 10) / traffic
            seconds += leaving_s if op is Op.BACKWARD else 0.0
        else:
            micro_batches = -(-self.step.sequences // self.step.micro_batch)
            seconds = self._decoder_s(op, layer, micro_batches)
            if op is Op.BACKWARD:
                # Each micro-batch's gradient is read in the weights' type and added to the fp32 sum.
                seconds += micro_batches * layer.numel * 10 / traffic + leaving_s
            elif spilled := self._spilled_bytes(layer):
                # Leaves on the D2H stream beside the next layer's work; the slower of the two sets the pace.
                seconds = max(seconds, spilled / self.hardware.link.to_host_gbps / 1e9)
        return Cost(Lane.COMPUTE, seconds, seconds)

    def _head_s(self) -> float:
        """All chunks of the head, whose three products have the hidden size, the vocabulary and the tokens between."""
        chunk = min(HEAD_CHUNK_TOKENS, self.step.micro_batch_tokens)
        chunks = -(-self.step.tokens // chunk)
        tails = chunks * 2.0 * (self.compute.hidden_size + self.compute.vocab_size) * self.hardware.device.product_tail
        logits = self.step.tokens * self.compute.vocab_size * LOGIT_BYTES
        return (3.0 * self._head_products + tails) / self._rate + logits / self.hardware.device.memory_gbps / 1e9

    def _decoder_s(self, op: Op, layer: LayerLayout, micro_batches: int) -> float:
        """All micro-batches through a decoder layer, forward, or back with its recompute."""
        device = self.hardware.device
        flops = self._forward_flops(layer)
        # The tail of a product is multiplied as its outputs are: as often as the inner dimension is long.
        matrices = [tensor.shape for tensor in layer.tensors if len(tensor.shape) == 2]
        tails = 2.0 * sum(inputs for _, inputs in matrices) * device.product_tail
        passes = 1
        if op is Op.BACKWARD:
            passes, kept = 3, self._is_kept(layer)
            recompute = 0.0 if kept else flops - self._left_out_flops
            flops = 2.0 * flops + recompute
            # The weights' gradients have tokens between, however they are cut into micro-batches.
            tails = 2.0 * sum(outputs for outputs, _ in matrices) * device.product_tail + (0.0 if kept else tails)
        # Where few tokens come to an expert, its weights take longer to read than to multiply.
        weights_s = passes * micro_batches * self._weight_bytes(layer) / (device.memory_gbps * 1e9)
        seconds = max((flops + micro_batches * tails) / self._rate, weights_s) + micro_batches * KERNELS_S
        return max(seconds, micro_batches * passes * device.pass_s)

    @property
    def _rate(self) -> float:
        """Operations a second of a layer at work."""
        return self.hardware.device.gemm_tflops * self.hardware.device.layer_efficiency * 1e12

    def _weight_bytes(self, layer: LayerLayout) -> int:
        return layer.numel * buffer_types(self.placement.tier.model.precision)[Buffer.WEIGHT].bytes

    def _is_kept(self, layer: LayerLayout) -> bool:
        """Whether a decoder layer is not recomputed. What it computes again all the same is elementwise."""
        return layer.index >= self._head.index - self.placement.schedule.kept_layers

    def _spilled_bytes(self, layer: LayerLayout) -> int:
        """Boundary activations of a layer that cross to pinned RAM and back."""
        if not 1 <= layer.index <= self.placement.spilled_boundaries:
            return 0
        return self.placement.tier.activation_bytes // self.placement.spilled_boundaries

    def _nvme(self, lane: Lane, num_bytes: int) -> Cost:
        nvme = self.hardware.nvme
        assert nvme is not None, "a placement on NVMe needs a machine with a drive"
        if lane is Lane.NVME_READ:
            return _transfer(lane, num_bytes, nvme.read_gbps, nvme.read_busy_gbps)
        return _transfer(lane, num_bytes, nvme.write_gbps, nvme.write_busy_gbps)


def _transfer(lane: Lane, num_bytes: int, alone_gbps: float, busy_gbps: float) -> Cost:
    return Cost(lane, num_bytes / alone_gbps / 1e9, num_bytes / busy_gbps / 1e9, num_bytes)
