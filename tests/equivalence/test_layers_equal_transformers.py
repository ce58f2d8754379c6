"""A model run layer by layer from flat buffers gives what transformers' own model gives: loss, and every gradient.

Compared in fp32 on the CPU. Where trained weights are compared elsewhere, mind that Qwen2's `k_proj.bias` has a
gradient that is zero in mathematics (a constant added to every key cancels in the softmax): Adam divides its rounding
noise by its own size, so those biases drift apart at full speed while nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.compute.head import Head
from pipeline.compute.template import LayerTemplate, tensor_views
from pipeline.errors import UnsupportedModelError
from pipeline.families import ModelSpec, family_of, load_model_spec, model_layout
from pipeline.families.attention import build_attention_context
from pipeline.messages import IGNORED
from tiers.layout import Precision

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_full_heads_with_biases": {
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3_rope": {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
    "llama_linear_rope": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama_padding_token": {"model_type": "llama", "pad_token_id": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_yarn": {"model_type": "qwen2", "rope_theta": 1000.0, "rope_scaling": YARN_ROPE},
    "qwen2_window_in_upper_layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3_wide_heads": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_tied_with_biases": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "mistral_full": {"model_type": "mistral", "sliding_window": None},
    "mistral_window": {"model_type": "mistral", "sliding_window": 5, "head_dim": 16},
    "mistral_window_beyond_sequence": {"model_type": "mistral", "sliding_window": 4096},
}


class LayerByLayer:
    """The model as the pipeline runs it, in the order of a step, on flat buffers filled from a transformers model."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], *, chunk_tokens: int = 4096) -> None:
        self.family, self.layout = family_of(spec), model_layout(spec)
        self.head = Head(chunk_tokens)
        self.weights = [torch.zeros(layer.numel) for layer in self.layout.layers]
        self.grads = [torch.zeros(layer.numel) for layer in self.layout.layers]
        for layer, flat in zip(self.layout.layers, self.weights, strict=True):
            for tensor, view in zip(layer.tensors, tensor_views(flat, layer), strict=True):
                view.copy_(weights[tensor.name])
        self.rotary = self.family.build_rotary(torch.device("cpu"))
        self.norm = self.family.build_final_norm()
        self.norm.weight = torch.nn.Parameter(self.views(self.weights, -1)[0])

    def views(self, flats: list[Tensor], index: int) -> tuple[Tensor, ...]:
        return tensor_views(flats[index], self.layout.layers[index])

    def step(
        self, input_ids: Tensor, targets: Tensor, position_ids: Tensor, single_document: bool, supervised: int
    ) -> float:
        tied = self.layout.tied
        context = build_attention_context(
            position_ids, self.rotary(position_ids, torch.float32), self.family.windows, single_document=single_document
        )
        embedding, embedding_grad = self.views(self.weights, 0)[0], self.views(self.grads, 0)[0]
        x, inputs, decoders = self.family.embed(input_ids, embedding), [], self.layout.layers[1:-1]
        templates = [LayerTemplate(self.family, d.index, d, self.weights[d.index]) for d in decoders]
        for template in templates:
            inputs.append(x)
            x = template.forward(x, context)
        norm_grad = self.views(self.grads, -1)[0]
        lm_head, lm_head_grad = (
            (embedding, embedding_grad) if tied else (self.views(self.weights, -1)[1], self.views(self.grads, -1)[1])
        )
        evaluated = self.head.loss(x, targets, self.norm, lm_head)
        loss, grad = self.head.loss_and_backward(
            x, targets, self.norm, lm_head, 1 / supervised, norm_grad, lm_head_grad
        )
        torch.testing.assert_close(evaluated / supervised, loss)
        for template, x, layer in zip(reversed(templates), reversed(inputs), reversed(decoders), strict=True):
            grad = template.backward(x, context, grad, tensor_views(self.grads[layer.index], layer))
        self.family.embed_backward(input_ids, grad, embedding_grad)
        return loss.item()

    def named_grads(self) -> dict[str, Tensor]:
        return {
            tensor.name: view
            for layer, flat in zip(self.layout.layers, self.grads, strict=True)
            for tensor, view in zip(layer.tensors, tensor_views(flat, layer), strict=True)
        }


def transformers_model(spec: ModelSpec, attention: str = "eager") -> torch.nn.Module:
    """The reference, of the same configuration but with transformers' own attention, at a start that varies norms."""
    config = type(spec.config).from_dict(spec.config.to_dict())
    config._attn_implementation = attention
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.1
    return model


def spec_of(name: str) -> ModelSpec:
    return load_model_spec(SIZES | MODELS[name], Precision.FP32)


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(0, 97, (batch, length), generator=generator)
    input_ids[0, :2] = 5  # the padding token of one of the models
    targets = torch.cat([input_ids[:, 1:], torch.full((batch, 1), IGNORED)], dim=1)
    targets[0, :3] = IGNORED
    return input_ids, targets


def reference_step(
    model: torch.nn.Module, documents: list[tuple[Tensor, Tensor]], supervised: int
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of transformers' model, documents run one by one."""
    total = 0.0
    for input_ids, targets in documents:
        logits = model(input_ids=input_ids, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        (loss / supervised).backward()
        total += loss.item() / supervised
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    # A tensor of its own scale each; a gradient that is zero in mathematics is compared with the largest of all.
    floor = max(grad.abs().max().item() for grad in expected.values()) * 1e-6
    for name, grad in got.items():
        difference = (grad - expected[name]).abs().max().item()
        scale = expected[name].abs().max().item()
        assert difference <= 2e-5 * scale + floor, f"{name}: differs by {difference:.2e}, largest {scale:.2e}"


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_equal_transformers(name: str) -> None:
    spec = spec_of(name)
    model = transformers_model(spec)
    input_ids, targets = tokens(2, 24)
    supervised = int((targets != IGNORED).sum())
    expected_loss, expected = reference_step(model, [(input_ids, targets)], supervised)
    ours = LayerByLayer(spec, model.state_dict(), chunk_tokens=10)
    positions = torch.arange(24).expand(2, 24)
    loss = ours.step(input_ids, targets, positions, single_document=True, supervised=supervised)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_equal_gradients(ours.named_grads(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_with_qwen3_heads_wider_than_hidden_size_too(name: str) -> None:
    spec = spec_of(name)
    model = transformers_model(spec)
    input_ids, _ = tokens(2, 24)
    with torch.no_grad():
        expected = model(input_ids=input_ids, use_cache=False).logits
    ours = LayerByLayer(spec, model.state_dict())
    positions = torch.arange(24).expand(2, 24)
    context = build_attention_context(
        positions, ours.rotary(positions, torch.float32), ours.family.windows, single_document=True
    )
    x = ours.family.embed(input_ids, ours.views(ours.weights, 0)[0])
    for layer in ours.layout.layers[1:-1]:
        x = LayerTemplate(ours.family, layer.index, layer, ours.weights[layer.index]).forward(x, context)
    lm_head = ours.views(ours.weights, 0)[0] if spec.tied else ours.views(ours.weights, -1)[1]
    torch.testing.assert_close(F.linear(ours.norm(x), lm_head), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2_window_in_upper_layers", "qwen3_wide_heads", "mistral_window"])
def test_packed_documents_equal_documents_run_apart(name: str) -> None:
    spec = spec_of(name)
    model = transformers_model(spec)
    input_ids, targets = tokens(2, 24)
    lengths = [[9, 1, 14], [24]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    targets = torch.where(torch.roll(positions, -1, 1) == 0, IGNORED, targets)
    supervised = int((targets != IGNORED).sum())
    documents = [
        (ids[None], wanted[None])
        for row, row_lengths in enumerate(lengths)
        for ids, wanted in zip(input_ids[row].split(row_lengths), targets[row].split(row_lengths), strict=True)
    ]
    expected_loss, expected = reference_step(model, documents, supervised)
    ours = LayerByLayer(spec, model.state_dict())
    loss = ours.step(input_ids, targets, positions, single_document=False, supervised=supervised)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_equal_gradients(ours.named_grads(), expected)


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_a_document_does_not_see_the_one_packed_before_it(name: str) -> None:
    spec = spec_of(name)
    ours = LayerByLayer(spec, transformers_model(spec).state_dict())
    input_ids, targets = tokens(1, 24)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    targets[:, :10] = IGNORED

    def loss_of_second() -> float:
        return ours.step(input_ids, targets, positions, single_document=False, supervised=13)

    before = loss_of_second()
    input_ids[0, :10] = (input_ids[0, :10] + 1) % 97
    assert loss_of_second() == before


@pytest.mark.parametrize("name", MODELS)
def test_layout_holds_exactly_the_parameters_of_transformers(name: str) -> None:
    spec = spec_of(name)
    expected = {name: tuple(p.shape) for name, p in transformers_model(spec).named_parameters()}
    got = {tensor.name: tensor.shape for layer in model_layout(spec).layers for tensor in layer.tensors}
    assert got == expected


def test_one_compiled_layer_serves_both_slots_and_every_set_of_documents() -> None:
    spec = spec_of("llama")
    model = transformers_model(spec)
    ours = LayerByLayer(spec, model.state_dict())
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(1)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(count, name="count_graphs")
    layers = ours.layout.layers[1:3]
    templates = [
        LayerTemplate(ours.family, d.index, d, ours.weights[d.index], compile=True, backend="count_graphs")
        for d in layers
    ]
    for first in (3, 11):
        positions = torch.cat([torch.arange(first), torch.arange(24 - first)])[None]
        context = build_attention_context(
            positions, ours.rotary(positions, torch.float32), ours.family.windows, single_document=False
        )
        x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(3))
        for template, layer in zip(templates, layers, strict=True):
            plain = LayerTemplate(ours.family, layer.index, layer, ours.weights[layer.index])
            torch.testing.assert_close(template.forward(x, context), plain.forward(x, context))
            grads, plain_grads = torch.zeros(layer.numel), torch.zeros(layer.numel)
            got = template.backward(x, context, x, tensor_views(grads, layer))
            torch.testing.assert_close(got, plain.backward(x, context, x, tensor_views(plain_grads, layer)))
            torch.testing.assert_close(grads, plain_grads)
    assert len(graphs) == 2, "one graph without gradients and one with"


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    spec = spec_of("llama")
    ours = LayerByLayer(spec, transformers_model(spec).state_dict())
    layer = ours.layout.layers[1]
    positions = torch.arange(24)[None]
    context = build_attention_context(
        positions, ours.rotary(positions, torch.bfloat16), ours.family.windows, single_document=True
    )
    template = LayerTemplate(ours.family, 1, layer, ours.weights[1].bfloat16())
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    once, often = torch.zeros(layer.numel), torch.zeros(layer.numel)
    template.backward(x, context, x, tensor_views(once, layer))
    for _ in range(32):
        template.backward(x, context, x, tensor_views(often, layer))
    # A sum kept in bf16 would be off by its 8 bits, 4e-3.
    torch.testing.assert_close(often, once * 32, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_gradient_leaves_the_others_in_their_places() -> None:
    spec = spec_of("qwen2")
    ours = LayerByLayer(spec, transformers_model(spec).state_dict())
    layer = ours.layout.layers[1]
    positions = torch.arange(24)[None]
    context = build_attention_context(
        positions, ours.rotary(positions, torch.float32), ours.family.windows, single_document=True
    )
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(4))
    whole, partial = torch.zeros(layer.numel), torch.zeros(layer.numel)
    template = LayerTemplate(ours.family, 1, layer, ours.weights[1])
    template.backward(x, context, x, tensor_views(whole, layer))

    class WithoutQueryBias(type(ours.family)):  # type: ignore[misc]
        """A layer whose `q_proj.bias` takes no part in the graph, as an expert without tokens would."""

        def run_decoder_layer(self, module, x_BSH, context):  # type: ignore[no-untyped-def]
            bias = module.self_attn.q_proj.bias
            module.self_attn.q_proj._parameters["bias"] = bias.detach()
            try:
                return super().run_decoder_layer(module, x_BSH, context)
            finally:
                module.self_attn.q_proj._parameters["bias"] = bias

    template = LayerTemplate(WithoutQueryBias(spec), 1, layer, ours.weights[1])
    template.backward(x, context, x, tensor_views(partial, layer))
    for tensor, got, expected in zip(
        layer.tensors, tensor_views(partial, layer), tensor_views(whole, layer), strict=True
    ):
        unused = tensor.name.endswith("q_proj.bias")
        torch.testing.assert_close(got, torch.zeros_like(got) if unused else expected)


def test_refusals_survive_the_way_between_processes() -> None:
    import pickle

    with pytest.raises(UnsupportedModelError) as caught:
        load_model_spec({"model_type": "gpt2"}, Precision.FP32)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
