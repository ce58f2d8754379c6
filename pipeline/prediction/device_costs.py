"""What the device's own work costs: arithmetic over its rate, memory traffic over bandwidth. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.memory.activation_bytes import HEAD_CHUNK_TOKENS
from pipeline.memory.shapes import ComputeShape, StepShape
from pipeline.prediction.hardware import Device
from pipeline.prediction.layer_traffic import (
    attention_elements,
    backward_elements,
    forward_elements,
    recompute_elements,
)
from pipeline.step.operations import Op
from tiers.layout import LayerKind, LayerLayout, TensorSpec

KERNELS_S = 20e-6
"""Launches that one micro-batch of a layer leaves the device idle for."""

LOGIT_BYTES = 14
"""Device traffic a logit beside the products: written and read in bf16, exponentiated in fp32, its gradient twice."""

ATTENTION_BACK = 2.5
"""Arithmetic of attention's backward, by its forward's two products: five, as it makes the scores again."""


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds of the compute lane, for the micro-batches of one wave."""

    compute: ComputeShape
    step: StepShape
    """Of the wave alone."""
    device: Device
    weight_bytes: int
    """An element."""
    mlp_chunk_tokens: int = 0
    """Tokens that pass a recomputed layer's feed-forward network at a time; 0 for a micro-batch."""

    def seconds(self, op: Op, layer: LayerLayout, *, kept: bool, leaves: bool) -> float:
        """Of FORWARD, RECOMPUTE, HEAD or BACKWARD.

        Args:
            op: The operation.
            layer: Which it passes.
            kept: Whether the layer is not recomputed. What it computes again all the same is elementwise.
            leaves: Whether its gradient is complete with this.
        """
        traffic = self.device.memory_gbps * 1e9
        # A finished gradient is converted, measured and zeroed: 4 + 2 + 4 + 4 bytes an element.
        leaving_s = layer.numel * 14 / traffic if leaves else 0.0
        if op is Op.HEAD:
            return self._head_s() + leaving_s
        backward = op is Op.BACKWARD
        if layer.kind is LayerKind.EMBEDDING:
            activations = self.step.tokens * self.compute.hidden_size
            return activations * (10 if backward else 4) / traffic + (leaving_s if backward else 0.0)
        if not backward:
            return self._decoder_s(Op.FORWARD, layer, kept)
        # Each part's gradient is read in the weights' type and added to the fp32 sum.
        added_s = self.step.micro_batches * self._passed(layer.tensors, kept) * 10 / traffic
        return self._decoder_s(op, layer, kept) + added_s + leaving_s

    def _chunks(self, kept: bool) -> int:
        """Parts in which a micro-batch passes a layer's feed-forward network."""
        return 1 if kept or not self.mlp_chunk_tokens else -(-self.step.micro_batch_tokens // self.mlp_chunk_tokens)

    def _passed(self, tensors: Iterable[TensorSpec], kept: bool) -> int:
        """Elements of weights, those that are passed in several parts of a micro-batch as often."""
        return sum(tensor.numel * (self._chunks(kept) if ".mlp." in tensor.name else 1) for tensor in tensors)

    def forward_flops(self, layer: LayerLayout) -> float:
        """Of a decoder layer."""
        return self._product_flops(layer) + self._attention_flops()

    def _product_flops(self, layer: LayerLayout) -> float:
        return 2.0 * self.compute.active_parameters(layer) * self.step.tokens

    def _attention_flops(self) -> float:
        # Causal attention: two products over half the sequence, as the design counts it.
        return 2.0 * self._keys * self.compute.query_size * self.step.tokens

    @property
    def _keys(self) -> int:
        """Tokens that the last of a sequence attends to."""
        return min(self.step.sequence_length, self.compute.attention_window or self.step.sequence_length)

    def head_flops(self) -> float:
        """Of the head, forward."""
        return 2.0 * self.compute.vocab_size * self.compute.hidden_size * self.step.tokens

    def _left_out_flops(self) -> float:
        """Of a decoder layer's last projection, which a recompute leaves out."""
        compute = self.compute
        products = compute.experts_per_token * compute.intermediate_size * compute.hidden_size
        return 2.0 * products * self.step.tokens

    def _head_s(self) -> float:
        """All chunks of the head, whose three products have the hidden size, the vocabulary and the tokens between."""
        chunk = min(HEAD_CHUNK_TOKENS, self.step.micro_batch_tokens)
        chunks = -(-self.step.tokens // chunk)
        tails = chunks * 2.0 * (self.compute.hidden_size + self.compute.vocab_size) * self.device.product_tail
        logits = self.step.tokens * self.compute.vocab_size * LOGIT_BYTES
        return (3.0 * self.head_flops() + tails) / self._rate + logits / self.device.memory_gbps / 1e9

    def _decoder_s(self, op: Op, layer: LayerLayout, kept: bool) -> float:
        """All micro-batches through a decoder layer, forward, or back with its recompute."""
        device, micro_batches = self.device, self.step.micro_batches
        recomputed = op is Op.BACKWARD and not kept
        passes = 3 if op is Op.BACKWARD else 1
        # Where few tokens come to an expert, its weights take longer to read than to multiply.
        read_bytes = self._passed(layer.tensors, kept) * self.weight_bytes
        weights_s = passes * micro_batches * read_bytes / (device.memory_gbps * 1e9)
        seconds = max(self._products_s(op, layer, kept), weights_s)
        if op is Op.BACKWARD:
            elements = backward_elements(self.compute, kept=kept)
            elements += recompute_elements(self.compute) if recomputed else 0
            seconds += self._attention_s(backward=True) + (self._attention_s(backward=False) if recomputed else 0.0)
        else:
            elements = forward_elements(self.compute)
            seconds += self._attention_s(backward=False)
        seconds += self._moving_s(elements) + micro_batches * KERNELS_S
        return max(seconds, micro_batches * passes * self._chunks(kept) * device.pass_s)

    def _products_s(self, op: Op, layer: LayerLayout, kept: bool) -> float:
        """A decoder layer's matrix products, their tails included."""
        flops = self._product_flops(layer)
        # The tail of a product is multiplied as its outputs are: as often as the inner dimension is long.
        chunks = self._chunks(kept)
        matrices = [
            (*tensor.shape, chunks if ".mlp." in tensor.name else 1)
            for tensor in layer.tensors
            if len(tensor.shape) == 2
        ]
        tails = 2.0 * sum(parts * inputs for _, inputs, parts in matrices) * self.device.product_tail
        if op is Op.BACKWARD:
            recompute = 0.0 if kept else flops - self._left_out_flops()
            flops = 2.0 * flops + recompute
            # The weights' gradients have tokens between, however they are cut into micro-batches.
            back = 2.0 * sum(parts * outputs for outputs, _, parts in matrices) * self.device.product_tail
            tails = back + (0.0 if kept else tails)
        return (flops + self.step.micro_batches * tails) / self._rate

    def _attention_s(self, *, backward: bool) -> float:
        """Attention of a decoder layer; its memory traffic sets the pace where its window is short."""
        flops = self._attention_flops() * (ATTENTION_BACK if backward else 1.0)
        rate = self.device.gemm_tflops * self.device.attention_efficiency_over(self._keys) * 1e12
        return max(flops / rate, self._moving_s(attention_elements(self.compute, backward=backward)))

    def _moving_s(self, elements: int) -> float:
        """Elements a token to and from memory, for all tokens."""
        return elements * self.weight_bytes * self.step.tokens / (self.device.memory_gbps * 1e9)

    @property
    def _rate(self) -> float:
        """Operations a second of matrix products."""
        return self.device.gemm_tflops * self.device.layer_efficiency * 1e12
