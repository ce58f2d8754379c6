"""The chunked head equals cross-entropy on whole logits, in fp32, without ever holding them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pipeline.compute.head import Head
from pipeline.memory.activation_bytes import work_term
from pipeline.memory.shapes import ComputeShape
from pipeline.messages import IGNORED
from support.live_bytes import LiveBytes

HIDDEN, VOCABULARY = 16, 53


@dataclass
class Result:
    """Loss and gradients of a head."""

    loss: Tensor
    x: Tensor
    norm: Tensor
    weight: Tensor


def inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, length, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    targets[0, : length // 3] = IGNORED
    norm = LlamaRMSNorm(HIDDEN)
    norm.weight = nn.Parameter((1 + 0.1 * torch.randn(HIDDEN, generator=generator)).to(dtype))
    return x, targets, norm, torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)


def ours(head: Head, x: Tensor, targets: Tensor, norm: nn.Module, weight: Tensor, scale: float) -> Result:
    norm_grad, weight_grad = torch.zeros(HIDDEN), torch.zeros(weight.shape)
    loss, grad_x = head.loss_and_backward(x, targets, norm, weight, scale, norm_grad, weight_grad)
    return Result(loss, grad_x, norm_grad, weight_grad)


def whole(x: Tensor, targets: Tensor, norm: nn.Module, weight: Tensor, scale: float) -> Result:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = F.linear(norm(x.flatten(0, 1)), weight).float()
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") * scale
    (norm_weight,) = norm.parameters()
    return Result(loss.detach(), *torch.autograd.grad(loss, (x, norm_weight, weight)))


def assert_close(got: Result, expected: Result, **tolerance: float) -> None:
    for name in ("loss", "x", "norm", "weight"):
        torch.testing.assert_close(
            getattr(got, name),
            getattr(expected, name),
            check_dtype=False,
            msg=lambda m, n=name: f"{n}: {m}",
            **tolerance,
        )


@pytest.mark.parametrize("chunk_tokens", [1, 7, 20, 4096])
def test_every_chunk_size_equals_cross_entropy_on_whole_logits(chunk_tokens: int) -> None:
    arguments = inputs(15)
    assert_close(ours(Head(chunk_tokens), *arguments, 1 / 25), whole(*arguments, 1 / 25), atol=1e-6, rtol=1e-6)


def test_one_chunk_gives_the_bits_of_pytorchs_loss() -> None:
    """The gradient may differ in the last bit: PyTorch's kernel has an exponential of its own."""
    arguments = inputs(15)
    got, expected = ours(Head(), *arguments, 1.0), whole(*arguments, 1.0)
    assert torch.equal(got.loss, expected.loss)
    assert_close(got, expected, atol=5e-7, rtol=1e-6)


def test_evaluation_gives_the_unscaled_sum() -> None:
    arguments = inputs(15)
    torch.testing.assert_close(Head(4).loss(*arguments), whole(*arguments, 1.0).loss)


def test_gradients_add_to_what_is_there() -> None:
    x, targets, norm, weight = inputs(15)
    norm_grad, weight_grad = torch.full((HIDDEN,), 3.0), torch.full(weight.shape, 3.0)
    Head(8).loss_and_backward(x, targets, norm, weight, 0.1, norm_grad, weight_grad)
    once = ours(Head(8), x, targets, norm, weight, 0.1)
    torch.testing.assert_close(norm_grad - 3, once.norm, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weight_grad - 3, once.weight, atol=1e-6, rtol=1e-5)


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    x, targets, norm, weight = inputs(15)
    targets.fill_(IGNORED)
    result = ours(Head(8), x, targets, norm, weight, 0.1)
    assert result.loss == 0
    assert not result.x.any()
    assert not result.norm.any()
    assert not result.weight.any()
    assert Head(8).loss(x, targets, norm, weight) == 0


def test_micro_batches_with_the_scale_of_the_step_equal_one_batch_of_unequal_parts() -> None:
    x, targets, norm, weight = inputs(15)
    targets[1, 1:] = IGNORED
    expected = whole(x, targets, norm, weight, 1 / 11)
    parts = [ours(Head(), x[row : row + 1], targets[row : row + 1], norm, weight, 1 / 11) for row in range(2)]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, expected.loss)
    torch.testing.assert_close(parts[0].weight + parts[1].weight, expected.weight)


def test_bf16_logits_are_normalised_in_fp32() -> None:
    """In bf16 a loss near 36 moves in steps of 0.25."""
    x, targets, norm, weight = inputs(15, torch.bfloat16)
    weight *= 8
    logits = F.linear(norm(x.flatten(0, 1)), weight).detach()
    exact = F.cross_entropy(logits.double(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    assert exact > 400
    assert ours(Head(7), x, targets, norm, weight, 1.0).loss.item() == pytest.approx(exact.item(), rel=1e-5)
    assert Head(7).loss(x, targets, norm, weight).item() == pytest.approx(exact.item(), rel=1e-5)


def test_bf16_weight_gradients_add_up_in_fp32() -> None:
    """Many chunks of small gradients after a large one: a bf16 sum would stand still."""
    x, targets, norm, weight = inputs(15, torch.bfloat16)
    result = ours(Head(1), x, targets, norm, weight, 1.0)
    norm_double = LlamaRMSNorm(HIDDEN)
    norm_double.weight = nn.Parameter(norm.weight.detach().double())
    expected = whole(x.double(), targets, norm_double, weight.double(), 1.0)
    assert (result.weight - expected.weight).norm() < 0.01 * expected.weight.norm()


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("length", [64, 256])
def test_no_tensor_grows_with_vocabulary_times_sequence(length: int) -> None:
    x, targets, norm, weight = inputs(length)
    with LargestTensor() as largest:
        ours(Head(8), x, targets, norm, weight, 0.1)
        Head(8).loss(x, targets, norm, weight)
    assert largest.numel == max(x.numel(), weight.numel(), 8 * VOCABULARY)


def test_a_compiled_chunk_equals_the_plain_one_whatever_the_scale() -> None:
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]):  # type: ignore[no-untyped-def]
        graphs.append(1)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(count, name="count_chunk_graphs")
    arguments = inputs(16)
    head = Head(8, compile=True, backend="count_chunk_graphs")
    for scale in (0.1, 0.2, 0.3):
        assert_close(ours(head, *arguments, scale), ours(Head(8), *arguments, scale), atol=0, rtol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_evaluation_holds_no_more_than_the_plan_has_for_training(dtype: torch.dtype, compiled: bool) -> None:
    tokens, vocabulary = 8192, 512  # more than one chunk
    x, targets = torch.ones(1, tokens, HIDDEN, dtype=dtype), torch.zeros(1, tokens, dtype=torch.long)
    norm, weight = LlamaRMSNorm(HIDDEN).to(dtype), torch.ones(vocabulary, HIDDEN, dtype=dtype)
    with LiveBytes([x, targets, weight, norm.weight]) as live:
        Head(compile=compiled).loss(x, targets, norm, weight)
    shape = ComputeShape(HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, vocabulary)
    account = work_term(shape, tokens, 0, weight.element_size(), compiled=compiled)
    assert account.name == "head chunk" and 0.3 * account.num_bytes < live.peak <= account.num_bytes
