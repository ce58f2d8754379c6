"""Weight gradients added to their fp32 sums as they are multiplied: no 16-bit product in between, no pass to add it.

A linear layer's own backward would hand out the product of the gradient of its output with its input, rounded to the
weights' type, for someone to read again and add. Here it hands out the two factors instead, as the "gradients" of two
stand-ins that take part in nothing; the caller multiplies straight into the sum. Used by `template` on CUDA, whose
products of 16-bit matrices can end in fp32.

Shapes: B sequences, S tokens, T = B x S, I inputs and O outputs of the linear layer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.compute.head import add_product


class FactoredLinear(nn.Module):
    """A linear layer whose weight gradient comes as two factors."""

    def __init__(
        self,
        linear: nn.Linear,
        *,
        computed: bool = True,
        made_again: bool = False,
        leader: FactoredLinear | None = None,
    ) -> None:
        """Take over the parameters of a layer.

        Args:
            linear: With real parameters.
            computed: False where nothing reads the output: zeros then stand for the product.
            made_again: Whether a compiler that parts the graph between forward and backward is to make the input again
                for the backward, if that is cheap, where it would keep it to hand it out.
            leader: A layer with the same input, which hands it out for both.
        """
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._computed = computed or linear.bias is not None
        self._made_again = made_again
        # In a tuple it is no part of this module, whose parameters those of the leader are not.
        self._leader = (leader,) if leader is not None else ()
        self._stand_ins: tuple[Tensor, Tensor] | None = None

    def stand_ins(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """What `factors` are the gradients of: [B, S, I] and [B, S, O] that take no memory; a leader's I is shared."""
        outputs, inputs = self.weight.shape
        if self._stand_ins is None or self._stand_ins[0].shape[:2] != (batch, length):
            zero = self.weight.detach().new_zeros(())
            self._stand_ins = (
                self._leader[0].stand_ins(batch, length)[0]
                if self._leader
                else zero.expand(batch, length, inputs).requires_grad_(),
                zero.expand(batch, length, outputs).requires_grad_(),
            )
        return self._stand_ins

    def forward(self, x_BSI: Tensor) -> Tensor:
        """As `nn.Linear`, [B, S, O]; `stand_ins` must have been asked for."""
        assert self._stand_ins is not None
        of_input, of_output = self._stand_ins
        output: Tensor = _Factored.apply(  # type: ignore[no-untyped-call]
            x_BSI,
            self.weight.detach(),
            self.bias,
            None if self._leader else of_input,
            of_output,
            self._computed,
            self._made_again,
        )
        return output


class _Factored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_input: Tensor | None,
        of_output: Tensor,
        computed: bool,
        made_again: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.hands_out_input, ctx.made_again = bias is not None, of_input is not None, made_again
        if not computed:
            return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads
        x, weight = ctx.saved_tensors
        grad_y_TO = grad_y.reshape(-1, grad_y.shape[-1])
        grad_bias = grad_y_TO.sum(0) if ctx.has_bias else None
        factor = x.detach() if ctx.hands_out_input else None
        if factor is not None and ctx.made_again:
            # What a backward returns and no gradient enters, the compiler takes for work of the forward and keeps. This
            # is x in every bit; where the gradient is not a number the sum is not, with or without.
            first = grad_y_TO[0, 0]
            factor = torch.where(first == first, factor, torch.nan)
        return (grad_y_TO @ weight).view(x.shape), None, grad_bias, factor, grad_y, None, None


def factor(
    module: nn.Module,
    shared_inputs: Iterable[Sequence[str]],
    *,
    left_out: str | None = None,
    kept: Container[str | None] | None = None,
) -> dict[str, FactoredLinear]:
    """Replace every linear layer of `module`.

    Args:
        module: Changed in place.
        shared_inputs: Names of linear layers that are given one tensor.
        left_out: Name of the one that is not computed.
        kept: Of a graph that is kept: names of those whose input it has anyway, the others' are made again.

    Returns:
        By the name of its weight.
    """
    groups = {name: group for group in shared_inputs for name in group}
    leaders: dict[Sequence[str], FactoredLinear] = {}
    factored: dict[str, FactoredLinear] = {}
    for name in [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]:
        linear, group = module.get_submodule(name), groups.get(name, (name,))
        assert isinstance(linear, nn.Linear)
        replacement = FactoredLinear(
            linear,
            computed=name != left_out,
            made_again=kept is not None and name not in kept,
            leader=leaders.get(group),
        )
        leaders.setdefault(group, replacement)
        factored[f"{name}.weight"] = replacement
        module.set_submodule(name, replacement)
    return factored


def add_weight_gradient(sum_fp32: Tensor, x_BSI: Tensor, grad_y_BSO: Tensor) -> None:
    """Add the weight gradient [O, I] of a linear layer, given as its two factors, to its fp32 sum."""
    grad_y_TO = grad_y_BSO.reshape(-1, grad_y_BSO.shape[-1])
    add_product(sum_fp32, grad_y_TO.t(), x_BSI.reshape(-1, x_BSI.shape[-1]))
