"""Kernels are compiled where Numba has no place for its cache: a read-only checkout without a home directory."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
import numpy as np
from pipeline.updates.adamw import *
from tasks.data.packing import cut_documents, pack
w, m, v, g = (np.ones(8, np.float32) for _ in range(4))
settings = OptimizerSettings((0.9, 0.95), 1e-8, 0.1)
update(w, None, m, v, g, Scalars.of(settings, lr=0.1, applied_steps=1, clip_coefficient=1.0, decay=True))
print(w[0])
print(pack(cut_documents(np.array([3, 5, 2]), 8, "split"), 8, shuffle=False, seed=0).num_sequences)
"""


def test_works_where_no_cache_can_be_written_and_says_so_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    weight, sequences = map(float, done.stdout.split())
    assert 0 < weight < 1 and sequences == 2
    assert done.stderr.count("compiles its kernels anew") == 1 and "set NUMBA_CACHE_DIR" in done.stderr
