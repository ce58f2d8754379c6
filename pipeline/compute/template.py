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
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeline.compute.layer_halves import chunks_of, keep_attention, keep_feed_forward
from pipeline.compute.recompute import leave_out
from pipeline.compute.weight_products import FactoredLinear, add_weight_gradient, factor
from pipeline.families.attention import AttentionContext
from pipeline.families.family import Family
from pipeline.families.layout import layer_parameter_names
from pipeline.memory.device_extras import KEPT_SHARE
from tiers.layout import LayerLayout

RunLayer = Callable[[Family, nn.Module, Tensor, AttentionContext], Tensor]
RunFeedForward = Callable[[Family, nn.Module, Tensor], Tensor]

COMPILED_VARIANTS = 32
"""Graphs that one compiled layer may have: with and without gradients, x signatures x batch shapes of training and
evaluation. Dynamo's own limit is 8, after which a layer would no longer be compiled."""


def tensor_views(flat: Tensor, layout: LayerLayout) -> tuple[Tensor, ...]:
    """Views of a flat buffer of at least `layout.numel` elements, one a tensor, in the order of the layout."""
    assert flat.dim() == 1 and flat.shape[0] >= layout.numel
    return tuple(flat.narrow(0, t.offset, t.numel).view(t.shape) for t in layout.tensors)


@dataclass(frozen=True, slots=True)
class KeptGraph:
    """What a forward keeps for a backward without recompute. The layer must lie in the same slot again by then."""

    layer_input: Tensor
    output_edge: GradientEdge
    """Where the gradient of the layer's output enters the graph, which does not hold the output itself."""
    stand_ins: tuple[tuple[int, Tensor, Tensor], ...]
    """Of linear layers whose weight gradient comes as two factors: place of the weight, and what gets the factors."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """A layer for graphs."""

    module: nn.Module
    factored: Mapping[int, FactoredLinear]
    """By place of its weight among the parameters."""


@dataclass(frozen=True, slots=True)
class _Halves:
    """A layer cut in two, each for passes without a graph and for graphs."""

    attention: nn.Module
    feed_forward: nn.Module
    attention_graph: _Variant
    feed_forward_graph: _Variant


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
        mlp_chunk_tokens: int = 0,
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
            factor_weights: Multiply weight gradients straight into their fp32 sums. Otherwise they are rounded to the
                weights' type in between, as PyTorch does.
            mlp_chunk_tokens: Most tokens that pass the feed-forward network at a time where a layer keeps no graph; 0
                for all of them.
            backend: Of `torch.compile`.
        """
        assert layout.index == layer_index
        self.signature = family.signature(layer_index)
        self._family = family
        self._layout = layout
        self._mlp_chunk_tokens = mlp_chunk_tokens
        self._names = layer_parameter_names(family, layout)
        # `data`: autograd must not count the slot's fillings. A kept graph refers to the slot, which may have held
        # other layers when its backward comes, and holds this one again.
        self._parameters = [nn.Parameter(view.data) for view in tensor_views(slot_buffer, layout)]
        self._module = self._built()

        self._kept = self._factored(self._built(), kept=True) if factor_weights else _Variant(self._module, {})
        # The same parameters again, in a layer that computes no more than a backward needs.
        left_out = family.last_projection
        self._recomputed = self._for_recompute(self._built(), left_out, factor_weights)
        self._halves: _Halves | None = None
        if mlp_chunk_tokens:
            blocks = family.blocks
            assert blocks is not None, "the layers of this family cannot be cut in two"
            self._halves = _Halves(
                keep_attention(self._built(), blocks),
                keep_feed_forward(self._built(), blocks),
                self._for_recompute(keep_attention(self._built(), blocks), None, factor_weights),
                self._for_recompute(keep_feed_forward(self._built(), blocks), left_out, factor_weights),
            )
        self._run: RunLayer = _compiled(_run_layer, backend) if compile else _run_layer
        self._run_feed_forward: RunFeedForward = _compiled(_run_feed_forward, backend) if compile else _run_feed_forward

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        """Run the layer that lies in the slot, without a graph."""
        with torch.no_grad():
            halves = self._halves_for(x_BSH)
            if halves is None:
                return self._run(self._family, self._module, x_BSH, context)
            y_BSH = self._run(self._family, halves.attention, x_BSH, context)
            y_TH = y_BSH.view(-1, y_BSH.shape[-1])
            for chunk in chunks_of(len(y_TH), self._mlp_chunk_tokens):
                y_TH[chunk] = self._run_feed_forward(self._family, halves.feed_forward, y_TH[chunk])
            return y_BSH

    def backward(
        self, x_BSH: Tensor, context: AttentionContext, grad_y_BSH: Tensor, accumulators: Sequence[Tensor]
    ) -> Tensor:
        """Recompute the layer from its input, as far as the backward needs it, and go back through it.

        Args:
            x_BSH: Input of the layer, as `forward` had it.
            context: As `forward` had it.
            grad_y_BSH: Gradient of the loss by the layer's output.
            accumulators: fp32, one a tensor in the order of the layout (`tensor_views`); every gradient is added
                to its own, in fp32. A parameter that took no part adds nothing.

        Returns:
            Gradient of the loss by the layer's input.
        """
        halves = self._halves_for(x_BSH)
        if halves is None:
            _, graph = self._graph(self._recomputed, x_BSH, context)
            return self.backward_kept(graph, grad_y_BSH, accumulators)
        m_BSH, graph = self._graph(halves.attention_graph, x_BSH, context)
        m_TH, grad_y_TH = (tensor.reshape(-1, x_BSH.shape[-1]) for tensor in (m_BSH, grad_y_BSH))
        grad_m_TH = torch.empty_like(m_TH)
        for chunk in chunks_of(len(m_TH), self._mlp_chunk_tokens):
            # Weight gradients of the chunks meet in the fp32 sums, as those of micro-batches do.
            grad_m_TH[chunk] = self.backward_kept(
                self._feed_forward_graph(halves.feed_forward_graph, m_TH[chunk]), grad_y_TH[chunk], accumulators
            )
        return self.backward_kept(graph, grad_m_TH.view_as(m_BSH), accumulators)

    def forward_kept(self, x_BSH: Tensor, context: AttentionContext) -> tuple[Tensor, KeptGraph]:
        """Run the layer that lies in the slot; return its output without a graph, and the graph."""
        with torch._functorch.config.patch(activation_memory_budget=KEPT_SHARE):
            return self._graph(self._kept, x_BSH, context)

    def backward_kept(self, graph: KeptGraph, grad_y_BSH: Tensor, accumulators: Sequence[Tensor]) -> Tensor:
        """Go back through a graph, which is used up by it; otherwise as `backward`."""
        factored = {place for place, _, _ in graph.stand_ins}
        others = [place for place in range(len(self._parameters)) if place not in factored]
        inputs = [graph.layer_input, *(self._parameters[place] for place in others)]
        # Layers with one input share its stand-in.
        of_inputs = {id(of_input): of_input for _, of_input, _ in graph.stand_ins}
        inputs += [*of_inputs.values(), *(of_output for _, _, of_output in graph.stand_ins)]
        grad_x_BSH, *grads = torch.autograd.grad(graph.output_edge, inputs, grad_y_BSH, allow_unused=True)
        for place, grad in zip(others, grads, strict=False):
            if grad is not None:
                accumulators[place].add_(grad)
        factors = grads[len(others) :]
        x_of = dict(zip(of_inputs, factors, strict=False))
        for (place, of_input, _), grad_y in zip(graph.stand_ins, factors[len(of_inputs) :], strict=True):
            add_weight_gradient(accumulators[place], x_of[id(of_input)], grad_y)
        assert grad_x_BSH is not None
        return grad_x_BSH

    def _graph(self, variant: _Variant, x_BSH: Tensor, context: AttentionContext) -> tuple[Tensor, KeptGraph]:
        stand_ins = _stand_ins(variant, *x_BSH.shape[:2])
        with torch.enable_grad():
            x_BSH = x_BSH.detach().requires_grad_()
            y_BSH = self._run(self._family, variant.module, x_BSH, context)
        return y_BSH.detach(), KeptGraph(x_BSH, get_gradient_edge(y_BSH), stand_ins)

    def _feed_forward_graph(self, variant: _Variant, m_CH: Tensor) -> KeptGraph:
        stand_ins = _stand_ins(variant, 1, len(m_CH))
        with torch.enable_grad():
            m_CH = m_CH.detach().requires_grad_()
            y_CH = self._run_feed_forward(self._family, variant.module, m_CH)
        return KeptGraph(m_CH, get_gradient_edge(y_CH), stand_ins)

    def _halves_for(self, x_BSH: Tensor) -> _Halves | None:
        """The halves, where the tokens are more than one chunk."""
        return self._halves if x_BSH.shape[0] * x_BSH.shape[1] > self._mlp_chunk_tokens else None

    def _built(self) -> nn.Module:
        """A layer of its own with the one set of parameters."""
        bound = dict(zip(self._names, self._parameters, strict=True))
        return _bind(self._family.build_decoder_layer(self._layout.index), bound)

    def _for_recompute(self, module: nn.Module, left_out: str | None, factor_weights: bool) -> _Variant:
        if factor_weights:
            return self._factored(module, left_out=left_out)
        if left_out is not None:
            leave_out(module, left_out)
        return _Variant(module, {})

    def _factored(self, module: nn.Module, *, left_out: str | None = None, kept: bool = False) -> _Variant:
        """A graph that is kept has the attention's output anyway; the other factors are cheap to make again."""
        factored = factor(
            module,
            self._family.shared_inputs,
            left_out=left_out,
            kept=(self._family.attention_projection,) if kept else None,
        )
        return _Variant(module, {self._names.index(name): linear for name, linear in factored.items()})


def _stand_ins(variant: _Variant, batch: int, length: int) -> tuple[tuple[int, Tensor, Tensor], ...]:
    return tuple((place, *linear.stand_ins(batch, length)) for place, linear in variant.factored.items())


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


def _run_feed_forward(family: Family, module: nn.Module, m_CH: Tensor) -> Tensor:
    """As `_run_layer`, of the half that knows no sequences."""
    return family.run_feed_forward(module, m_CH)


@lru_cache(maxsize=4)
def _compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
    compiled: Callable[..., Tensor] = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
    return compiled


def compiled_graphs() -> int:
    """Graphs that `torch.compile` has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
