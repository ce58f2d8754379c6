"""Leaves out of a recomputed layer what its backward never reads: the product of the layer's last projection.

That product only enters the layer's output, as a summand of the residual stream; the backward pass needs the inputs of
the projection, its weight and the gradient of its output. Called by `template`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class UncomputedLinear(nn.Module):
    """A linear layer without bias whose output is zeros in place of the product, and whose gradients are right."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros [..., out] for x [..., in]; gradients reach `x` and the weight as if x @ weight.T were there."""
        output: Tensor = _Uncomputed.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return output


class _Uncomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        # The very products of torch's own backward of a linear layer, in their order: the bits are the same.
        (grad_y,) = grads
        x, weight = ctx.saved_tensors
        grad_y_TO = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = (grad_y_TO @ weight).view(x.shape)
        return grad_x, grad_y_TO.t() @ x.reshape(-1, x.shape[-1])


def leave_out(module: nn.Module, projection: str) -> bool:
    """Replace the linear layer called `projection` by one that is not computed.

    Returns:
        Whether it was: a projection with a bias stays, which no family has by default.
    """
    linear = module.get_submodule(projection)
    assert isinstance(linear, nn.Linear), f"{projection} is a {type(linear).__name__}"
    if set(dict(linear.named_parameters())) != {"weight"}:
        return False
    module.set_submodule(projection, UncomputedLinear(linear.get_parameter("weight")))
    return True
