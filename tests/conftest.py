"""What tests of every kind share: one real local Ray for those that need it, and stacks when something hangs."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

faulthandler.enable()
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def ray_local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An embedded Ray of this test session's own, stopped at its end."""
    from cluster.join import embedded

    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path  # workers inherit it: they import our packages from the checkout
    with embedded(num_cpus=4):
        yield
