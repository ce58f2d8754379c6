"""The GPU that Ray hands out is the one that the plan was made for, or one with as much room."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.ray

TWO_GPUS = """
import os
import ray
from cluster.errors import ClusterRefusedError
from cluster.join import embedded
from tasks.assigned_gpu import require_planned_gpu

class Job:
    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

def never():
    raise AssertionError("the GPU is the planned one: nothing to ask")

with embedded(num_cpus=1, num_gpus=2):
    print("alone:", require_planned_gpu(20 << 30, never))
    other = ray.remote(num_cpus=0, num_gpus=1)(Job).remote()
    print("other job has", ray.get(other.gpu.remote()))
    print("beside:", require_planned_gpu(20 << 30, lambda: (20 << 30, "large")))
    try:
        require_planned_gpu(20 << 30, lambda: (5 << 30, "small"))
    except ClusterRefusedError as error:
        print("refused:", error)
"""


def test_a_gpu_with_less_room_than_the_plan_takes_is_refused() -> None:
    """Of two that only Ray counts here."""
    with tempfile.TemporaryDirectory(prefix="g-") as temp:
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        environment |= {"TMPDIR": temp, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "3,5"}
        ran = subprocess.run(
            [sys.executable, "-c", TWO_GPUS], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert ran.returncode == 0, ran.stderr
    lines = dict(line.split(":", 1) if ":" in line else (line, "") for line in ran.stdout.splitlines())
    assert lines["alone"] == " None" and "other job has 3" in lines
    told = " Ray hands out GPU 5 (%s, %s free), the plan was made for GPU 3"
    assert lines["beside"] == told % ("large", "20.00 GiB") + "; 20.00 GiB are enough"
    assert lines["refused"].startswith(told % ("small", "5.00 GiB") + " and takes 20.00 GiB of it")
    assert "CUDA_VISIBLE_DEVICES=5 for this command" in lines["refused"]
