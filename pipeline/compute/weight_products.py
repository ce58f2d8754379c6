"""Weight gradients added to their fp32 sums as they are multiplied: no 16-bit product in between, no pass to add it.

A linear layer's own backward would hand out the product of the gradient of its output with its input, rounded to the
weights' type, for someone to read again and add. Here it hands out the two factors instead, as the "gradients" of two
stand-ins that take part in nothing; the caller multiplies straight into the sum. Used by `template` on CUDA, whose
products of 16-bit matrices can end in fp32.

Shapes: B sequences, S tokens, T = B x S, I inputs and O outputs of the linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.compute.head import add_product


class FactoredLinear(nn.Module):
    """A linear layer whose weight gradient comes as two factors."""

    def __init__(self, linear: nn.Linear, *, computed: bool) -> None:
        """Take over the parameters of a layer.

        Args:
            linear: With real parameters.
            computed: False where nothing reads the output: zeros then stand for the product.
        """
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._computed = computed or linear.bias is not None
        self._stand_ins: tuple[Tensor, Tensor] | None = None

    def stand_ins(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """What `factors` are the gradients of: [B, S, I] and [B, S, O] that take no memory."""
        outputs, inputs = self.weight.shape
        if self._stand_ins is None or self._stand_ins[0].shape[:2] != (batch, length):
            zero = self.weight.detach().new_zeros(())
            self._stand_ins = (
                zero.expand(batch, length, inputs).requires_grad_(),
                zero.expand(batch, length, outputs).requires_grad_(),
            )
        return self._stand_ins

    def forward(self, x_BSI: Tensor) -> Tensor:
        """As `nn.Linear`, [B, S, O]; `stand_ins` must have been asked for."""
        assert self._stand_ins is not None
        output: Tensor = _Factored.apply(  # type: ignore[no-untyped-call]
            x_BSI, self.weight.detach(), self.bias, *self._stand_ins, self._computed
        )
        return output


class _Factored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _input: Tensor, _output: Tensor, computed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        if not computed:
            return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads
        x, weight = ctx.saved_tensors
        grad_y_TO = grad_y.reshape(-1, grad_y.shape[-1])
        grad_bias = grad_y_TO.sum(0) if ctx.has_bias else None
        return (grad_y_TO @ weight).view(x.shape), None, grad_bias, x.detach(), grad_y, None


def factor(module: nn.Module, left_out: str | None) -> dict[str, FactoredLinear]:
    """Replace every linear layer of `module`; the one called `left_out` is not computed.

    Returns:
        By the name of its weight.
    """
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    factored: dict[str, FactoredLinear] = {}
    for name in linears:
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        factored[f"{name}.weight"] = FactoredLinear(linear, computed=name != left_out)
        module.set_submodule(name, factored[f"{name}.weight"])
    return factored


def add_weight_gradient(sum_fp32: Tensor, x_BSI: Tensor, grad_y_BSO: Tensor) -> None:
    """Add the weight gradient [O, I] of a linear layer, given as its two factors, to its fp32 sum."""
    grad_y_TO = grad_y_BSO.reshape(-1, grad_y_BSO.shape[-1])
    add_product(sum_fp32, grad_y_TO.t(), x_BSI.reshape(-1, x_BSI.shape[-1]))
