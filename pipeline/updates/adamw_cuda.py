"""AdamW on the GPU, with the bits of `adamw`: each operation is one instruction that rounds once.

Imported only where there is CUDA. The instructions are written out, since what a compiler may fuse (a multiply and an
add) or approximate (root, division) would round otherwise than the host does; none flushes denormals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeline.updates.adamw import Scalars

BLOCK_ELEMENTS = 1024


def update_on_gpu(
    weight: torch.Tensor,
    weight_low: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    scalars: Scalars,
) -> None:
    """Enqueue the update of equally long contiguous runs in place, on the current stream; `gradient` is only read.

    Args:
        weight: bf16, the high half of the master, with `weight_low`; or the fp32 master itself without.
        weight_low: int16 low half of the master.
        exp_avg: First moment, fp32.
        exp_avg_sq: Second moment, fp32.
        gradient: bf16 or fp32.
        scalars: As for the host's kernel.
    """
    numel = weight.numel()
    split, bf16_gradient = weight_low is not None, gradient.dtype == torch.bfloat16
    assert weight.dtype == (torch.bfloat16 if split else torch.float32)
    _kernel[(triton.cdiv(numel, BLOCK_ELEMENTS),)](
        weight.view(torch.int16) if split else weight,
        weight_low if split else weight,
        exp_avg,
        exp_avg_sq,
        gradient.view(torch.int16) if bf16_gradient else gradient,
        numel,
        *(float(value) for value in scalars),
        SPLIT=split,
        BF16_GRADIENT=bf16_gradient,
        BLOCK=BLOCK_ELEMENTS,
    )


@triton.jit
def _multiply(a, b):
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def _add(a, b):
    return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def _subtract(a, b):
    return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def _divide(a, b):
    return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def _root(a):
    return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [a], tl.float32, is_pure=True, pack=1)


@triton.jit
def _kernel(
    weight,
    weight_low,
    exp_avg,
    exp_avg_sq,
    gradient,
    numel,
    clip,
    keep,
    beta1_rest,
    beta2,
    beta2_rest,
    step_size,
    root_correction,
    eps,
    SPLIT: tl.constexpr,
    BF16_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    if BF16_GRADIENT:
        g_bits = tl.load(gradient + at, mask=inside, other=0).to(tl.int32) << 16
        g = g_bits.to(tl.float32, bitcast=True)
    else:
        g = tl.load(gradient + at, mask=inside, other=0.0)
    if SPLIT:
        high = tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16
        low = tl.load(weight_low + at, mask=inside, other=0).to(tl.int32)
        w = (high + low).to(tl.float32, bitcast=True)
    else:
        w = tl.load(weight + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    g = _multiply(g, clip)
    w = _multiply(w, keep)
    m = _add(m, _multiply(_subtract(g, m), beta1_rest))
    v = _add(_multiply(v, beta2), _multiply(_multiply(g, g), beta2_rest))
    w = _subtract(w, _divide(_multiply(m, step_size), _add(_divide(_root(v), root_correction), eps)))
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        half = (bits + 0x8000) >> 16
        tl.store(weight + at, half.to(tl.int16), mask=inside)
        tl.store(weight_low + at, (bits - (half << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(weight + at, w, mask=inside)
