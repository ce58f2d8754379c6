"""AdamW over flat runs of host memory, in one pass: each element is read once and written once.

The order of operations, each rounded to fp32 on its own, is that of `torch.optim.AdamW`:

    g  = gradient * clip
    w  = w * (1 - lr * weight_decay)
    m  = m + (g - m) * (1 - beta1)
    v  = v * beta2 + (g * g) * (1 - beta2)
    w  = w - (lr / (1 - beta1^t) * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Scalars are computed in fp64 and rounded to fp32 once, as PyTorch does; the root is correctly rounded. The kernels are
compiled without fast-math, so no multiply and add is contracted, denormals are kept, and results depend neither on the
vector width nor on where a run is cut. Called by `optimizer_pool` from several threads: the kernels release the GIL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import overload

from pipeline.machine_code import compiled

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What AdamW needs besides the step; the recipe's `[optimizer]`."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """For the tensors whose layout says `decay`."""


class Scalars(NamedTuple):
    """The constants of one update. A named tuple, because Numba compiles those."""

    clip: np.float32
    keep: np.float32
    """1 - lr * weight_decay."""
    beta1_rest: np.float32
    beta2: np.float32
    beta2_rest: np.float32
    step_size: np.float32
    """lr / (1 - beta1^t)."""
    root_correction: np.float32
    """sqrt(1 - beta2^t)."""
    eps: np.float32

    @classmethod
    def of(
        cls, settings: OptimizerSettings, *, lr: float, applied_steps: int, clip_coefficient: float, decay: bool
    ) -> Scalars:
        """Compute the constants of applied step `applied_steps`, counted from 1, with or without weight decay."""
        assert applied_steps >= 1, "bias correction divides by 1 - beta^t"
        beta1, beta2 = settings.betas
        return cls(
            clip=np.float32(clip_coefficient),
            keep=np.float32(1 - lr * settings.weight_decay if decay else 1.0),
            beta1_rest=np.float32(1 - beta1),
            beta2=np.float32(beta2),
            beta2_rest=np.float32(1 - beta2),
            step_size=np.float32(lr / (1 - beta1**applied_steps)),
            root_correction=np.float32(math.sqrt(1 - beta2**applied_steps)),
            eps=np.float32(settings.eps),
        )


def update(
    weight: npt.NDArray[np.uint16] | Float32Array,
    weight_low: npt.NDArray[np.int16] | None,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    gradient: npt.NDArray[np.uint16] | Float32Array,
    scalars: Scalars,
) -> None:
    """Update equally long contiguous runs in place; `gradient` is only read.

    Args:
        weight: bf16 bits (uint16), the high half of the master, with `weight_low`; or the fp32 master itself without.
        weight_low: int16 low half of the master, as in `tiers.master`.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        gradient: bf16 bits (uint16) or fp32.
        scalars: Of this step, for tensors with or without weight decay.
    """
    # Inside, the kernels trust the shapes.
    assert weight.shape == exp_avg.shape == exp_avg_sq.shape == gradient.shape, "runs of different length"
    if weight_low is None:
        assert weight.dtype == np.float32, "a bf16 weight needs its low half"
        _update_whole(weight, exp_avg, exp_avg_sq, gradient, scalars)
    else:
        assert weight.dtype == np.uint16 and weight.shape == weight_low.shape, "halves do not match"
        _update_split(weight, weight_low, exp_avg, exp_avg_sq, gradient, scalars)


def _kernel(function: Callable[..., None]) -> Callable[..., None]:
    return compiled(function, nogil=True, error_model="numpy")


def _as_fp32(value: Any) -> Any:
    """The fp32 value of a gradient element; its type decides when a kernel is compiled."""
    raise NotImplementedError


# Numba compares the signature with those of the lambdas, which cannot carry annotations.
@overload(_as_fp32, inline="always")
def _as_fp32_by_type(value):  # type: ignore[no-untyped-def]
    if isinstance(value, numba.types.Integer):
        return lambda value: np.int32(np.int32(value) << np.int32(16)).view(np.float32)
    return lambda value: value


@numba.njit(error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def _element(w: Any, m: Any, v: Any, gradient: Any, s: Scalars) -> tuple[Any, Any, Any]:
    g = _as_fp32(gradient) * s.clip
    w = w * s.keep
    m = m + (g - m) * s.beta1_rest
    v = v * s.beta2 + (g * g) * s.beta2_rest
    w = w - (s.step_size * m) / (np.sqrt(v) / s.root_correction + s.eps)
    return w, m, v


# Both loops run over range(array.size): only with indices that the compiler knows to be in bounds and not negative does
# LLVM vectorise them.


@_kernel
def _update_split(high: Any, low: Any, exp_avg: Any, exp_avg_sq: Any, gradient: Any, scalars: Scalars) -> None:
    for i in range(high.size):
        master = np.int32((np.int32(high[i]) << np.int32(16)) + np.int32(low[i])).view(np.float32)
        w, m, v = _element(master, exp_avg[i], exp_avg_sq[i], gradient[i], scalars)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        bits = np.float32(w).view(np.int32)
        half = (bits + np.int32(0x8000)) >> np.int32(16)
        high[i] = np.uint16(half)
        low[i] = np.int16(bits - (half << np.int32(16)))


@_kernel
def _update_whole(weight: Any, exp_avg: Any, exp_avg_sq: Any, gradient: Any, scalars: Scalars) -> None:
    for i in range(weight.size):
        w, m, v = _element(weight[i], exp_avg[i], exp_avg_sq[i], gradient[i], scalars)
        weight[i] = w
        exp_avg[i] = m
        exp_avg_sq[i] = v
