"""A recompute that leaves out the last projection gives the gradients of the whole layer, in every bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipeline.compute.recompute import UncomputedLinear, leave_out
from pipeline.compute.template import LayerTemplate, tensor_views
from support.layer_case import LayerCase
from support.tiny import FAMILIES, tiny_config
from tiers.layout import Precision


class Case(LayerCase):
    """A layer and the template under test."""

    def __init__(self, config: dict[str, object], precision: Precision = Precision.FP32, **options: bool | str) -> None:
        super().__init__(config, precision, 0.1)
        self.template = LayerTemplate(self.family, 1, self.layout, self.flat, **options)  # type: ignore[arg-type]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """By the input, and by the weights in the flat order."""
        flat = torch.zeros(self.layout.numel)
        by_input = self.template.backward(self.x, self.context, self.grad, tensor_views(flat, self.layout))
        return by_input, flat

    def gradients_of_the_whole_layer(self) -> tuple[Tensor, Tensor]:
        self.template._recomputed = self.template._kept
        return self.gradients()


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_layer_in_every_bit(family: str, precision: Precision) -> None:
    case = Case(tiny_config(family), precision)
    assert isinstance(case.template._recomputed.module.get_submodule("mlp.down_proj"), UncomputedLinear)
    got, wanted = case.gradients(), case.gradients_of_the_whole_layer()
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert bool(got[1].any())


def test_a_layer_with_a_biased_last_projection_is_recomputed_whole() -> None:
    case = Case(tiny_config("llama", mlp_bias=True))
    assert isinstance(case.template._recomputed.module.get_submodule("mlp.down_proj"), nn.Linear)
    assert not leave_out(case.family.build_decoder_layer(1), "mlp.down_proj")


def test_the_compiled_recompute_is_one_graph_and_holds_no_product_of_the_projection() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch._dynamo.register_backend(capture, name="capture_recompute")
    eager = Case(tiny_config("llama"))
    for _ in range(2):
        compiled = Case(tiny_config("llama"), compile=True, backend="capture_recompute")
        got, wanted = compiled.gradients(), eager.gradients()
        torch.testing.assert_close(got, wanted)
    assert len(graphs) == 1
    products = [node for node in graphs[0].graph.nodes if "linear" in str(node.target)]
    assert len(products) == 6, "q, k, v, o, gate and up; not down"


@pytest.mark.parametrize("config", [{}, {"mlp_bias": True, "attention_bias": True}], ids=["plain", "biases"])
def test_weight_gradients_multiplied_into_their_sums_are_those_of_autograd(config: dict[str, object]) -> None:
    plain, factored = (Case(tiny_config("llama", **config), factor_weights=flag) for flag in (False, True))
    wanted, got = plain.gradients(), factored.gradients()
    assert torch.equal(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1])


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_graph_multiplies_its_weight_gradients_into_the_same_sums(family: str, compile: bool) -> None:
    torch._dynamo.reset()
    options = {"factor_weights": True, "compile": compile, "backend": "aot_eager_decomp_partition"}
    case = Case(tiny_config(family), Precision.BF16, **options)
    by_input, sums = case.gradients()
    kept = torch.zeros(case.layout.numel)
    y, graph = case.template.forward_kept(case.x, case.context)
    got = case.template.backward_kept(graph, case.grad, tensor_views(kept, case.layout))
    assert torch.equal(y, case.template.forward(case.x, case.context))
    assert torch.equal(got, by_input) and torch.equal(kept, sums) and bool(kept.any())


def test_a_gradient_that_is_no_number_reaches_the_sums_of_a_kept_graph() -> None:
    case = Case(tiny_config("llama"), factor_weights=True)
    sums = torch.zeros(case.layout.numel)
    _, graph = case.template.forward_kept(case.x, case.context)
    case.template.backward_kept(graph, torch.full_like(case.grad, torch.nan), tensor_views(sums, case.layout))
    for tensor, view in zip(case.layout.tensors, tensor_views(sums, case.layout), strict=True):
        assert not bool(view.isfinite().any()), tensor.name


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_a_family_says_share_an_input_are_given_one_tensor(family: str) -> None:
    case = Case(tiny_config(family))
    inputs: dict[str, Tensor] = {}
    module = case.template._module
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0]))  # type: ignore[misc]
    case.template.forward(case.x, case.context)
    for group in case.family.shared_inputs:
        assert all(inputs[name] is inputs[group[0]] for name in group)
    named = {name for group in case.family.shared_inputs for name in group}
    assert named | {case.family.attention_projection, case.family.last_projection} == set(inputs)


def test_products_into_fp32_sums_are_nearer_to_the_truth_than_rounded_ones() -> None:
    exact = Case(tiny_config("qwen2"))
    distances = []
    for flag in (False, True):
        case = Case(tiny_config("qwen2"), Precision.BF16, factor_weights=flag)
        exact.flat.copy_(case.flat.float())
        exact.x, exact.grad = case.x.float(), case.grad.float()
        distances.append(float((case.gradients()[1] - exact.gradients()[1]).norm()))
    assert distances[1] <= distances[0]


def test_a_compiled_layer_gives_its_factors_in_one_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    eager = Case(tiny_config("qwen2"))
    for _ in range(2):
        compiled = Case(tiny_config("qwen2"), compile=True, factor_weights=True, backend="aot_eager")
        torch.testing.assert_close(compiled.gradients(), eager.gradients())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
