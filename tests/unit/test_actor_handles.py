"""The environment that an actor's process is started with."""

from __future__ import annotations

from pipeline.actor_handles import environment_of


def test_only_compute_sees_a_gpu_and_every_actor_has_its_number_of_threads() -> None:
    assert environment_of(threads=3, gpu=False, given={}) == {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": ""}
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(threads=1, gpu=True, given={})


def test_freed_device_memory_can_be_taken_for_blocks_of_any_size_unless_the_user_says_otherwise() -> None:
    assert environment_of(threads=1, gpu=True, given={})["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    own = "max_split_size_mb:64"
    assert environment_of(threads=1, gpu=True, given={"PYTORCH_ALLOC_CONF": own})["PYTORCH_ALLOC_CONF"] == own
    assert "PYTORCH_ALLOC_CONF" not in environment_of(threads=1, gpu=True, given={"PYTORCH_CUDA_ALLOC_CONF": own})
