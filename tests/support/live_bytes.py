"""Counts the bytes of tensors that live at a time, on the CPU, where no allocator does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made while it is entered held at a time, after any operation."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """Start to count.

        Args:
            known: Tensors made before, views of which are not counted.
        """
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in self._known:
                self._live[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._live.values()))
        return result
