"""The table of predictions beside measurements: equal quantities side by side, the sign of a miss as one reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.memory.footprint import GIB, Place
from pipeline.prediction.hardware import find_hardware, load_hardware
from pipeline.recipe import load_recipe
from pipeline.stalls import Stalls
from tasks.bench.comparison import Figure, compare
from tasks.bench.show import show
from tasks.bench.step import StepReport
from tasks.preparation import Preparation, prepare

RECIPE = Path(__file__).parent.parent.parent / "tasks" / "recipes" / "bench" / "qwen2.5-0.5b.toml"
CONFIG = (
    'model.config={model_type="qwen2",vocab_size=512,hidden_size=64,intermediate_size=128,num_hidden_layers=2,'
    "num_attention_heads=4,num_key_value_heads=2,tie_word_embeddings=true}"
)


@pytest.fixture(scope="module")
def preparation() -> Preparation:
    return prepare(
        load_recipe(RECIPE, [CONFIG, "train.device=cpu", "train.sequences_per_step=4", "train.micro_batch=2"])
    )


def report(step_s: float, host_bytes: int) -> StepReport:
    return StepReport(
        parameters=1,
        tokens=1,
        step_s=step_s,
        step_s_all=(step_s,),
        tokens_per_s=1.0,
        model_tflops=1.0,
        lanes={"compute": 0.5, "update": 0.1},
        stalls=Stalls(),
        gaps=(),
        update_gparams_per_s=1.0,
        gpu_peak_bytes=0,
        compiled_graphs=0,
        compiled_late=0,
        device_taken_bytes=0,
        host_bytes=host_bytes,
        host_taken_bytes=host_bytes,
        arena_bytes=1,
        nvme_read_bytes=0,
        nvme_write_bytes=0,
        first_step_s=1.0,
        loss=1.0,
        grad_norm=1.0,
    )


def test_bytes_are_compared_without_a_machine_and_seconds_with_one(preparation: Preparation) -> None:
    without = {figure.name for figure in compare(preparation, report(1.0, GIB), None)}
    assert without == {"host: arena, driver and actors", "host: all that became unavailable"}
    hardware = load_hardware(find_hardware("h200-measured"))
    figures = {figure.name: figure for figure in compare(preparation, report(2.0, GIB), hardware)}
    assert figures["step"].measured == 2.0 and figures["busy: compute"].measured == 1.0
    assert figures["busy: update"].measured == pytest.approx(0.2)
    assert "busy: nvme_read" not in figures


def test_memory_of_a_device_that_the_cpu_stands_in_for_counts_to_the_host(preparation: Preparation) -> None:
    placement = preparation.placement
    held, taken = compare(preparation, report(1.0, GIB), None)
    assert held.predicted >= placement.used(Place.DEVICE) + placement.arena_bytes
    assert taken.predicted <= placement.used(Place.DEVICE) + placement.used(Place.RAM)


def test_a_prediction_above_the_measurement_is_shown_as_positive(capsys: pytest.CaptureFixture[str]) -> None:
    show({"plan": (Figure("step", "s", 1.1, 1.0), Figure("device", "bytes", GIB, 2 * GIB))})
    text = capsys.readouterr().out
    assert "+10.0%" in text and "-50.0%" in text and "2.00 GiB" in text


def test_small_sizes_and_times_are_shown_in_units_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    show({"plan": (Figure("step", "s", 0.0011, 0.001), Figure("device", "bytes", 3 << 20, 2 << 20))})
    text = capsys.readouterr().out
    assert "1.10 ms" in text and "3.00 MiB" in text and "0.00" not in text
