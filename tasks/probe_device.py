"""Rates of the device and of the link to it. On a machine without CUDA the CPU stands in for the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from pipeline.prediction.device_costs import ATTENTION_BACK
from pipeline.prediction.hardware import ATTENTION_KEYS, GIB, NO_GPU, Device, Link
from tiers.host_memory import available_host_bytes

GEMM_SIZE = 8192
HEAD_SIZE = 128
LONG = 32_768
"""Tokens of a sequence long enough to tell how fast attention becomes, short enough to fit small devices."""
CPU_PASS_S = 1e-3
"""Some forty operations of a layer that is not compiled, called from Python; an assumption."""
LINK_BYTES = 1 << 30
"""A power of two: PyTorch's pinned allocator would round anything else up."""


def measure_device(copy_gbps: float, seconds: float) -> Device:
    """Matrix products, attention, memory traffic and size of the device.

    What a layer's products lose to those of one large matrix is not measured: `Device` has a default.
    """
    if not torch.cuda.is_available():
        device = torch.device("cpu")
        gemm = _gemm_tflops(device, 1024, seconds)
        return Device(
            NO_GPU,
            available_host_bytes() / GIB,
            gemm,
            copy_gbps,
            attention_efficiency=_attention_tflops(device, 2, 4, 256, seconds) / gemm,
            product_tail=_product_tail(device, gemm, 128, seconds),
            pass_s=CPU_PASS_S,
        )
    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info()
    gemm = _gemm_tflops(device, GEMM_SIZE, seconds)
    source = torch.ones(LINK_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    traffic = _repeat(lambda: target.copy_(source), seconds) * 2 * LINK_BYTES / 1e9
    attention = _attention_tflops(device, 8, 16, ATTENTION_KEYS, seconds) / gemm
    return Device(
        torch.cuda.get_device_name(),
        free / GIB,
        gemm,
        traffic,
        attention_efficiency=attention,
        long_attention_efficiency=_endless(attention, _attention_tflops(device, 1, 16, LONG, seconds) / gemm),
        product_tail=_product_tail(device, gemm, 1024, seconds),
    )


def measure_link(copy_gbps: float, seconds: float) -> Link:
    """Copies between the device and pinned memory, alone and both ways at once."""
    if not torch.cuda.is_available():
        # A copy reads and writes: half its traffic is what arrives.
        return Link(copy_gbps / 2, copy_gbps / 2, copy_gbps / 4)
    size = LINK_BYTES if available_host_bytes() > 8 * LINK_BYTES else LINK_BYTES // 8
    hosts = [torch.ones(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def to_device() -> None:
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)

    def to_host() -> None:
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    def both() -> None:
        to_device()
        to_host()

    rates = [_repeat(copy, seconds) * size / 1e9 for copy in (to_device, to_host, both)]
    return Link(*rates)


@contextmanager
def busy_device() -> Iterator[None]:
    """Keep the device computing and DMA running both ways inside: what an update meets during training."""
    if not torch.cuda.is_available():
        yield
        return
    size = LINK_BYTES // 8
    left, right = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    hosts = [torch.ones(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with torch.cuda.stream(streams[0]):
                for _ in range(8):
                    torch.mm(left, right)
            for _ in range(4):
                with torch.cuda.stream(streams[1]):
                    devices[0].copy_(hosts[0], non_blocking=True)
                with torch.cuda.stream(streams[2]):
                    hosts[1].copy_(devices[1], non_blocking=True)
            # Sleeping, not spinning: the core belongs to the measurement.
            ended = torch.cuda.Event(blocking=True)
            ended.record(streams[0])
            ended.synchronize()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()
        torch.cuda.synchronize()


def _gemm_tflops(device: torch.device, size: int, seconds: float) -> float:
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return _repeat(lambda: torch.mm(left, right), seconds) * 2 * size**3 / 1e12


def _attention_tflops(device: torch.device, sequences: int, heads: int, length: int, seconds: float) -> float:
    """Causal attention forward and backward: 2 products of half the positions, and ATTENTION_BACK times as many."""
    shape = (sequences, heads, length, HEAD_SIZE)
    query, key, value, grad = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]

    def both() -> None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, inputs, grad)

    forward_flops = 2 * length * heads * HEAD_SIZE * sequences * length
    return _repeat(both, seconds) * (1 + ATTENTION_BACK) * forward_flops / 1e12


def _endless(short: float, long: float) -> float:
    """Attention's efficiency over a sequence without end, by those over ATTENTION_KEYS and over LONG tokens.

    As `Device.attention_efficiency_over` has it; 0, not known, where the longer one gains nothing.
    """
    share = ATTENTION_KEYS / LONG
    return (1 - share) / (1 / long - share / short) if short < long < short / share else 0.0


def _product_tail(device: torch.device, gemm_tflops: float, rows: int, seconds: float) -> float:
    """Outputs that a product of few rows costs beyond its own at the rate of large ones, on average over widths."""
    tails = []
    for width in range(1, 6):
        inner, columns = 4 * rows, width * rows
        left = torch.randn(rows, inner, device=device).to(torch.bfloat16)
        right = torch.randn(inner, columns, device=device).to(torch.bfloat16)

        def several(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            # So many that waiting for their end is no part of it.
            for _ in range(16):
                torch.mm(left, right)

        product_s = 1 / (16 * _repeat(several, seconds / 5))
        tails.append(product_s * gemm_tflops * 1e12 / (2 * inner) - rows * columns)
    return max(0.0, sum(tails) / len(tails))


def _repeat(work: Callable[[], object], seconds: float) -> float:
    """Times a second that `work` is done, after two for warming up."""
    for _ in range(2):
        work()
    _finish()
    start, done = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        for _ in range(4):
            work()
        _finish()
        done += 4
    return done / (time.monotonic() - start)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
