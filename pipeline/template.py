"""A decoder layer without weights of its own: its parameters are views of a device slot, whatever layer lies there.

Called by the compute actor. A template never copies a weight and keeps nothing of a call: the graph of a backward
pass lives inside `backward`, or with the caller who asked to keep it. Shapes: B sequences, S tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from pipeline.attention import AttentionContext
from pipeline.device_extras import KEPT_SHARE
from pipeline.families.family import Family
from pipeline.families.layout import layer_parameter_names
from pipeline.recompute import leave_out
from pipeline.weight_products import FactoredLinear, add_weight_gradient, factor
from tiers.layout import LayerLayout

RunLayer = Callable[[Family, nn.Module, Tensor, AttentionContext], Tensor]

COMPILED_VARIANTS = 32
"""Graphs that one compiled layer may have: with and without gradients, x signatures x batch shapes of training and
evaluation. Dynamo's own limit is 8, after which a layer would no longer be compiled."""


def tensor_views(flat: Tensor, layout: LayerLayout) -> tuple[Tensor, ...]:
    """Views of a flat buffer of at least `layout.numel` elements, one a tensor, in the order of the layout."""
    assert flat.dim() == 1 and flat.shape[0] >= layout.numel
    return tuple(flat.narrow(0, t.offset, t.numel).view(t.shape) for t in layout.tensors)


@dataclass(frozen=True, slots=True)
class KeptGraph:
    """What a forward keeps for a backward without recompute. The layer must stay in its slot until then."""

    layer_input: Tensor
    layer_output: Tensor
    """With the autograd graph behind it."""
    stand_ins: tuple[tuple[int, Tensor, Tensor], ...]
    """Of linear layers whose weight gradient comes as two factors: place of the weight, and what gets the factors."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """A layer for graphs."""

    module: nn.Module
    factored: Mapping[int, FactoredLinear]
    """By place of its weight among the parameters."""


class LayerTemplate:
    """Runs any decoder layer of one signature from one slot."""

    def __init__(
        self,
        family: Family,
        layer_index: int,
        layout: LayerLayout,
        slot_buffer: Tensor,
        compile: bool = False,
        factor_weights: bool = False,
        backend: str = "inductor",
    ) -> None:
        """Bind a layer to a slot.

        Args:
            family: Builds and runs the layer.
            layer_index: A decoder layer (1..L); the template serves every layer with its signature.
            layout: Of that layer.
            slot_buffer: Flat weights of the slot, [at least layout.numel] in the type to compute in. Owned by the
                caller, who may fill it anew between calls and must keep it as long as the template.
            compile: Compile the layer; templates of equal signature share the compiled graphs.
            factor_weights: Where a layer is recomputed, multiply weight gradients straight into their fp32 sums.
                Otherwise they are rounded to the weights' type in between, as PyTorch does.
            backend: Of `torch.compile`.
        """
        assert layout.index == layer_index
        self.signature = family.signature(layer_index)
        self._family = family
        self._layout = layout
        names = layer_parameter_names(family, layout)
        self._parameters = [nn.Parameter(view) for view in tensor_views(slot_buffer, layout)]
        bound = dict(zip(names, self._parameters, strict=True))
        self._module = _bind(family.build_decoder_layer(layer_index), bound)

        # Not factored: the compiler would keep every factor from forward to backward, half as much again.
        self._kept = _Variant(self._module, {})
        # The same parameters again, in a layer that computes no more than a backward needs.
        recomputed, left_out = _bind(family.build_decoder_layer(layer_index), bound), family.last_projection
        factored: dict[int, FactoredLinear] = {}
        if factor_weights:
            factored = {names.index(name): linear for name, linear in factor(recomputed, left_out).items()}
        elif left_out is not None:
            leave_out(recomputed, left_out)
        self._recomputed = _Variant(recomputed, factored)
        self._run: RunLayer = _compiled(backend) if compile else _run_layer

    def accumulator_views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of the flat gradient accumulator for `backward`, in the order of the layout."""
        return tensor_views(flat, self._layout)

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        """Run the layer that lies in the slot, without a graph."""
        with torch.no_grad():
            return self._run(self._family, self._module, x_BSH, context)

    def backward(
        self, x_BSH: Tensor, context: AttentionContext, grad_y_BSH: Tensor, accumulators: Sequence[Tensor]
    ) -> Tensor:
        """Recompute the layer from its input, as far as the backward needs it, and go back through it.

        Args:
            x_BSH: Input of the layer, as `forward` had it.
            context: As `forward` had it.
            grad_y_BSH: Gradient of the loss by the layer's output.
            accumulators: fp32, one a tensor in the order of the layout (`accumulator_views`); every gradient is added
                to its own, in fp32. A parameter that took no part adds nothing.

        Returns:
            Gradient of the loss by the layer's input.
        """
        return self.backward_kept(self._graph(self._recomputed, x_BSH, context), grad_y_BSH, accumulators)

    def forward_kept(self, x_BSH: Tensor, context: AttentionContext) -> tuple[Tensor, KeptGraph]:
        """Run the layer that lies in the slot; return its output without a graph, and the graph."""
        with torch._functorch.config.patch(activation_memory_budget=KEPT_SHARE):
            graph = self._graph(self._kept, x_BSH, context)
        return graph.layer_output.detach(), graph

    def backward_kept(self, graph: KeptGraph, grad_y_BSH: Tensor, accumulators: Sequence[Tensor]) -> Tensor:
        """Go back through a graph, which is used up by it; otherwise as `backward`."""
        factored = {place for place, _, _ in graph.stand_ins}
        others = [place for place in range(len(self._parameters)) if place not in factored]
        inputs = [graph.layer_input, *(self._parameters[place] for place in others)]
        inputs += [stand_in for _, *pair in graph.stand_ins for stand_in in pair]
        grad_x_BSH, *grads = torch.autograd.grad(graph.layer_output, inputs, grad_y_BSH, allow_unused=True)
        for place, grad in zip(others, grads, strict=False):
            if grad is not None:
                accumulators[place].add_(grad)
        factors = iter(grads[len(others) :])
        for (place, _, _), x, grad_y in zip(graph.stand_ins, factors, factors, strict=True):
            add_weight_gradient(accumulators[place], x, grad_y)
        assert grad_x_BSH is not None
        return grad_x_BSH

    def _graph(self, variant: _Variant, x_BSH: Tensor, context: AttentionContext) -> KeptGraph:
        batch, length, _ = x_BSH.shape
        stand_ins = tuple((at, *linear.stand_ins(batch, length)) for at, linear in variant.factored.items())
        with torch.enable_grad():
            x_BSH = x_BSH.detach().requires_grad_()
            return KeptGraph(x_BSH, self._run(self._family, variant.module, x_BSH, context), stand_ins)


def _bind(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Give a layer its parameters by name."""
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)
    assert sum(1 for _ in module.parameters()) == len(parameters), "a parameter has no place in the layout"
    return module


def _run_layer(family: Family, module: nn.Module, x_BSH: Tensor, context: AttentionContext) -> Tensor:
    """The function that is compiled: the module is an argument, so that both slots share what is compiled."""
    return family.run_decoder_layer(module, x_BSH, context)


@lru_cache(maxsize=4)
def _compiled(backend: str) -> RunLayer:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
    compiled: RunLayer = torch.compile(_run_layer, backend=backend, dynamic=False, fullgraph=True)
    return compiled
