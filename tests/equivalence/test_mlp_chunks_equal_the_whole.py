"""A layer whose feed-forward network runs on some tokens at a time gives what the whole layer gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.compute.layer_halves import chunks_of
from pipeline.compute.template import LayerTemplate, tensor_views
from support.layer_case import LENGTH, SEQUENCES, LayerCase
from support.local_compute import local_compute
from support.tiny import FAMILIES, random_batch, tiny_config
from tiers.layout import Precision


class Case(LayerCase):
    """A layer, run by templates with and without chunks."""

    def __init__(self, config: dict[str, object], precision: Precision = Precision.FP32) -> None:
        super().__init__(config, precision, 0.3)

    def run(self, mlp_chunk_tokens: int, **options: bool | str) -> tuple[Tensor, ...]:
        """Output, gradient by the input, and by each weight."""
        template = LayerTemplate(
            self.family,
            1,
            self.layout,
            self.flat,
            mlp_chunk_tokens=mlp_chunk_tokens,
            **options,  # type: ignore[arg-type]
        )
        sums = torch.zeros(self.layout.numel)
        y = template.forward(self.x, self.context)
        views = tensor_views(sums, self.layout)
        return y, template.backward(self.x, self.context, self.grad, views), *views


@pytest.mark.parametrize("chunk_tokens", [16, 20, 47], ids=["equal", "with a rest", "across sequences"])
@pytest.mark.parametrize("factor_weights", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_equal_the_whole_to_the_rounding_of_fp32(family: str, factor_weights: bool, chunk_tokens: int) -> None:
    case = Case(tiny_config(family))
    whole = case.run(0, factor_weights=factor_weights)
    chunked = case.run(chunk_tokens, factor_weights=factor_weights)
    again = case.run(chunk_tokens, factor_weights=factor_weights)
    for got, wanted, repeated in zip(chunked, whole, again, strict=True):
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()
        assert torch.equal(got, repeated)


def test_biases_of_the_feed_forward_network_are_summed_over_the_chunks() -> None:
    case = Case(tiny_config("llama", mlp_bias=True, attention_bias=True))
    for got, wanted in zip(case.run(16), case.run(0), strict=True):
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("chunk_tokens", [0, SEQUENCES * LENGTH])
def test_one_chunk_is_the_whole_layer_in_every_bit(chunk_tokens: int) -> None:
    case = Case(tiny_config("qwen2"), Precision.BF16)
    assert all(map(torch.equal, case.run(chunk_tokens), case.run(0)))


def test_compiled_halves_serve_every_chunk_and_layer_without_another_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    case = Case(tiny_config("qwen2"))
    eager = case.run(16)
    for _ in range(2):
        torch.testing.assert_close(case.run(16, compile=True, factor_weights=True, backend="aot_eager"), eager)
    assert counters["stats"]["unique_graphs"] == 4, "each half with and without gradients"
    assert not counters["graph_break"]


def test_a_step_in_chunks_has_the_loss_and_the_gradients_of_the_step() -> None:
    batch, found = random_batch(3, packed=True), []
    for chunk_tokens in (0, 16):
        with local_compute(tiny_config("qwen3"), mlp_chunk_tokens=chunk_tokens) as run:
            found.append((run.step(1, batch), run.evaluate(-1, batch), run.gradients()))
    (whole, evaluated, wanted), (chunked, evaluated_in_chunks, got) = found
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-6)
    assert evaluated_in_chunks.loss_sum == pytest.approx(evaluated.loss_sum, rel=1e-6)
    assert any(not torch.equal(got[name], gradient) for name, gradient in wanted.items()), "sums of chunks round"
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize(
    ("tokens", "chunk_tokens", "sizes"),
    [(131072, 16384, {16384}), (100_000, 16384, {14336, 13984}), (48, 20, {20, 8}), (5, 8, {5})],
)
def test_chunks_are_of_one_size_and_a_rest(tokens: int, chunk_tokens: int, sizes: set[int]) -> None:
    chunks = list(chunks_of(tokens, chunk_tokens))
    assert [token for chunk in chunks for token in range(tokens)[chunk]] == list(range(tokens))
    assert {chunk.stop - chunk.start for chunk in chunks} == sizes
