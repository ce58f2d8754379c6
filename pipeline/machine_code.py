"""Compiles functions with Numba, whose cache on disk is a help and no need."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, **options: Any) -> Function:
    """Compile at the first call; later processes load the machine code from Numba's cache where there is one.

    Args:
        function: Of arrays and scalars.
        options: Of `numba.njit`.
    """
    try:
        kernel: Function = numba.njit(function, cache=True, **options)
    except RuntimeError:  # "no locator available": neither beside the source nor in the home directory can it write
        _say_once()
        kernel = numba.njit(function, **options)
    return kernel


@functools.cache
def _say_once() -> None:
    logger.warning(
        "Numba has no directory for its cache, every process compiles its kernels anew (seconds each): "
        "set NUMBA_CACHE_DIR to one that can be written"
    )
