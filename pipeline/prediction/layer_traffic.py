"""Device memory traffic of what a decoder layer does between its matrix products, by token. Pure.

Counted on compiled layers, where neighbours are fused: a chain of elementwise operations reads what it needs once and
writes what others need once, and a norm's row stays near while its mean is taken. What products and attention read and
write themselves passes beside their arithmetic. Elements a token, with hidden size h, queries q, keys or values k, and
f = experts of a token x intermediate size:

    forward     norm: read x, write its product with the scale                                              2h
                rotary: read and write queries and keys                                                     2q + 2k
                residual and second norm: read x and the attention's, write the sum and its norm            4h
                activation: read gate and up, write their product                                           3f
                residual: read the sum and the network's, write the layer's output                          3h
    recompute   the same without the last residual, which nothing reads                                    -3h
    backward    activation: read the product's gradient, gate and up, write the gradients of the two        5f
                second norm: read both products' gradients, its input and the residual's, write their sum   5h
                  and for its scale the three again, summed over the tokens                                 3h
                rotary: read and write gradients of queries and keys                                        2q + 2k
                first norm: as the second, of three products                                                6h + 4h
    kept        a layer that is not recomputed keeps neither norm nor the product of gate and up: the
                  kernels that read their sources anyway write them again                                   2h + f
    experts     of a mixture's e: forward, each token is copied to them (2eh) and their outputs are summed  (3e - 1)h
                backward, the same of gradients, two products' for each                                     (4e - 2)h

Layers that are not compiled move several times as much. Where that happens the device is a CPU, whose caches hold most
of it.
"""

from __future__ import annotations

from pipeline.memory.shapes import ComputeShape


def forward_elements(compute: ComputeShape) -> int:
    """Elements a token that go to and from memory on the way forward."""
    mixture = (3 * compute.experts_per_token - 1) * compute.hidden_size if compute.num_experts > 1 else 0
    return 9 * compute.hidden_size + _rotary(compute) + 3 * _network(compute) + mixture


def recompute_elements(compute: ComputeShape) -> int:
    """Those of a forward whose last residual is left out."""
    outputs = 3 + (compute.experts_per_token - 1 if compute.num_experts > 1 else 0)
    return forward_elements(compute) - outputs * compute.hidden_size


def backward_elements(compute: ComputeShape, *, kept: bool) -> int:
    """Those of the way back, without a recompute before it.

    Args:
        compute: Sizes of activations.
        kept: Whether the layer kept its graph from the forward: it then has some of its activations to make again.
    """
    mixture = (4 * compute.experts_per_token - 2) * compute.hidden_size if compute.num_experts > 1 else 0
    again = 2 * compute.hidden_size + _network(compute) if kept else 0
    return 18 * compute.hidden_size + _rotary(compute) + 5 * _network(compute) + mixture + again


def attention_elements(compute: ComputeShape, *, backward: bool) -> int:
    """What attention alone reads and writes.

    Forward queries, keys, values and outputs; backward those, the outputs' gradient, and the gradients that it makes.
    """
    once = 2 * compute.query_size + 2 * compute.kv_size
    return 2 * once if backward else once


def _rotary(compute: ComputeShape) -> int:
    return 2 * (compute.query_size + compute.kv_size)


def _network(compute: ComputeShape) -> int:
    return compute.experts_per_token * compute.intermediate_size
