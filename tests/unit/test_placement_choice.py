from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.families import load_model_spec, model_layout
from pipeline.memory.device_ways import CHUNK_TOKENS
from pipeline.memory.footprint import GIB, Place
from pipeline.memory.shapes import ComputeShape, StepShape
from pipeline.placement import MemoryBudget, Placement, PlacementError, PlacementRequest, place
from pipeline.prediction.assumed_hardware import CPU, assumed_hardware
from pipeline.prediction.costs import CostModel
from pipeline.prediction.hardware import SHIPPED, Hardware, load_hardware
from pipeline.prediction.placement_choice import MOST_TOKENS_AT_ONCE, WORTH_A_LARGER_ONE, choose, micro_batches_of
from pipeline.prediction.simulate import simulate
from pipeline.recipe import load_recipe
from pipeline.recipe_placement import request_of, shape_of
from tiers.layout import Precision

QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
H200 = load_hardware(SHIPPED / "h200-measured.toml")
ROOMY = MemoryBudget(ram_bytes=100 * GIB, gpu_bytes=130 * GIB)
SIZES = (1, 2, 4, 8, 16, 32)


def request(sequences: int = 32) -> PlacementRequest:
    spec = load_model_spec(QWEN_05B, Precision.BF16)
    compute = ComputeShape.of_config(spec.config.to_dict())
    return PlacementRequest(model_layout(spec), compute, StepShape(1024, sequences, 1), clip=True)


def step_s(wanted: PlacementRequest, placement: Placement, hardware: Hardware = H200) -> float:
    return simulate(CostModel(placement, wanted.compute, placement.step, hardware)).step_s


@pytest.mark.parametrize(
    ("sequences", "length", "sizes"),
    [
        (64, 1024, (1, 2, 4, 8, 16, 32, 64)),
        (48, 1024, (1, 2, 4, 8, 16, 48)),
        (7, 1024, (1, 7)),
        (64, 8192, (1, 2, 4, 8)),
        (4, 4 * MOST_TOKENS_AT_ONCE, (1,)),
        (1, 16, (1,)),
    ],
)
def test_micro_batches_divide_the_step_and_stay_below_what_gains_nothing(
    sequences: int, length: int, sizes: tuple[int, ...]
) -> None:
    assert micro_batches_of(sequences, length) == sizes


def test_a_roomy_device_takes_a_micro_batch_that_no_other_beats_by_more_than_a_prediction_is_good_for() -> None:
    wanted = request()
    chosen = place(wanted, ROOMY, H200, SIZES)
    alternatives = [place(replace(wanted, step=replace(wanted.step, micro_batch=size)), ROOMY) for size in SIZES]
    assert chosen.step.micro_batch > 4, "of small ones the host cannot launch enough"
    assert step_s(wanted, chosen) <= min(step_s(wanted, each) for each in alternatives) / 0.97


def test_the_micro_batch_always_fits_and_shrinks_with_the_device() -> None:
    wanted = request()
    least = place(wanted, ROOMY, H200).used(Place.DEVICE)
    sizes = []
    for share in (0.2, 0.35, 1.0):
        budget = replace(ROOMY, gpu_bytes=int(least * share))
        found = place(wanted, budget, H200, SIZES)
        assert found.used(Place.DEVICE) <= budget.gpu_bytes
        sizes.append(found.step.micro_batch)
    # Of larger ones the steps hardly differ.
    assert sizes[0] < min(sizes[1:])


def test_a_given_micro_batch_is_kept_and_a_refusal_speaks_of_the_smallest() -> None:
    given = request()
    given = replace(given, step=replace(given.step, micro_batch=4))
    assert place(given, ROOMY, H200).step.micro_batch == 4
    none = replace(ROOMY, gpu_bytes=GIB)
    with pytest.raises(PlacementError) as caught:
        place(request(), none, H200, SIZES)
    gpu_bytes = int(float(str(caught.value).rpartition("memory.gpu_gib = ")[2]) * GIB)
    assert place(request(), replace(none, gpu_bytes=gpu_bytes), H200, SIZES).step.micro_batch == 1


@pytest.mark.parametrize("update_gparams_per_s", [4.5, 500.0])
@pytest.mark.parametrize("sequences", [8, 128])
def test_what_is_chosen_is_never_slower_than_with_or_without_updates_on_the_device(
    sequences: int, update_gparams_per_s: float
) -> None:
    wanted = request(sequences)
    wanted = replace(wanted, step=replace(wanted.step, micro_batch=8))
    host = replace(H200.host, update_busy_gparams_per_s=update_gparams_per_s)
    machine = replace(H200, host=replace(host, update_gparams_per_s=1.1 * update_gparams_per_s))
    for gpu_gib in (10, 20, 60):
        budget = replace(ROOMY, gpu_bytes=gpu_gib * GIB)
        both = [place(replace(wanted, device_updates=flag), budget) for flag in (True, False)]
        chosen = place(wanted, budget, machine)
        assert step_s(wanted, chosen, machine) <= min(step_s(wanted, each, machine) for each in both)


QWEN_7B = load_recipe(SHIPPED.parent / "plan/qwen2.5-7b.toml")
RTX_4090 = load_hardware(SHIPPED / "rtx4090-256gb-1nvme.toml")


def fastest_of_given_chunks(wanted: PlacementRequest, budget: MemoryBudget) -> float:
    """The shortest step with the size of chunks fixed, seconds."""
    given = [replace(wanted, mlp_chunk_tokens=size) for size in (0, *CHUNK_TOKENS)]
    found = [choose(each, budget, RTX_4090) for each in given]
    return min(step_s(wanted, each, RTX_4090) for each in found if isinstance(each, Placement))


@pytest.mark.parametrize("gpu_gib", [14, 15, 18, 20])
def test_networks_pass_whole_where_spilling_takes_no_time(gpu_gib: int) -> None:
    """By the spills that they save alone, chunks of 4,096 tokens were chosen here, for a step 3 % longer than whole."""
    wanted = request_of(QWEN_7B.with_micro_batch(16), shape_of(QWEN_7B), cuda=True, optimizer_actors=4)
    budget = MemoryBudget(ram_bytes=240 * GIB, gpu_bytes=gpu_gib * GIB)
    chosen = place(wanted, budget, RTX_4090)
    assert chosen.spilled_boundaries and not chosen.mlp_chunk_tokens
    assert step_s(wanted, chosen, RTX_4090) <= fastest_of_given_chunks(wanted, budget) / WORTH_A_LARGER_ONE


def test_networks_pass_in_chunks_where_ram_has_no_room_for_what_they_push_out() -> None:
    """Recomputing more, which makes room too, takes longer."""
    train = QWEN_7B.train.model_copy(update={"sequence_length": 32768, "sequences_per_step": 2, "micro_batch": 1})
    long = QWEN_7B.model_copy(update={"train": train})
    wanted = request_of(long, shape_of(long), cuda=True, optimizer_actors=4)
    roomy = MemoryBudget(ram_bytes=240 * GIB, gpu_bytes=18 * GIB)
    whole = place(wanted, roomy, RTX_4090)
    assert not whole.mlp_chunk_tokens
    budget = replace(roomy, ram_bytes=whole.arena_bytes - 1)
    chosen = place(wanted, budget, RTX_4090)
    assert chosen.mlp_chunk_tokens and chosen.schedule.boundary_every == 1
    assert step_s(wanted, chosen, RTX_4090) <= fastest_of_given_chunks(wanted, budget) / WORTH_A_LARGER_ONE


def test_a_larger_micro_batch_is_compared_with_its_own_best_chunks() -> None:
    """With the chunks that save spills, micro-batches of 16 sequences lost to those of 8."""
    wanted = request_of(QWEN_7B, shape_of(QWEN_7B), cuda=True, optimizer_actors=4)
    budget = MemoryBudget(ram_bytes=240 * GIB, gpu_bytes=18 * GIB)
    chosen = place(wanted, budget, RTX_4090, (4, 8, 16))
    sizes = [replace(wanted, step=replace(wanted.step, micro_batch=size)) for size in (4, 8, 16)]
    fastest = min(fastest_of_given_chunks(each, budget) for each in sizes)
    assert step_s(wanted, chosen, RTX_4090) <= fastest / WORTH_A_LARGER_ONE


def test_the_same_request_is_placed_alike_every_time() -> None:
    assert place(request(), ROOMY, H200, SIZES) == place(request(), ROOMY, H200, SIZES)


@pytest.mark.parametrize(
    ("gpu", "cores", "stands_for"),
    [
        ("NVIDIA H200", 16, "H200 + 125 GiB"),
        ("NVIDIA H200", 96, "H200 + 1.5 TB"),
        ("NVIDIA GeForce RTX 4090", 16, "RTX 4090"),
        ("NVIDIA GH200 480GB", 72, "GH200"),
        ("Some Other Card", 8, "A100"),
    ],
)
def test_a_machine_without_a_file_is_taken_for_the_shipped_one_that_is_most_like_it(
    gpu: str, cores: int, stands_for: str
) -> None:
    assumed = assumed_hardware(gpu, cores)
    assert stands_for in assumed.name and assumed.origin.startswith("assumed from")
    assert assumed.nvme is not None, "a run may have a drive"
    assert assumed_hardware(None, cores) == CPU
