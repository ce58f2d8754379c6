"""What a refusal offers makes the model fit when it is followed as printed, on the machine that it speaks of."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.machine_memory import MachineMemory
from pipeline.memory.footprint import GIB, Place
from pipeline.memory.least import amount as amount_of
from pipeline.memory.least import least_of
from pipeline.memory.placement_search import solve
from pipeline.placement import MemoryBudget, Placement, PlacementError, preflight
from pipeline.prediction.hardware import SHIPPED
from pipeline.recipe import RecipeError, load_recipe
from pipeline.recipe_placement import place_recipe, request_of, shape_of

RECIPES = SHIPPED.parent / "plan"
UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SMALL = (
    'model.config={model_type="qwen2",vocab_size=32000,hidden_size=1024,intermediate_size=4096,num_hidden_layers=24,'
    "num_attention_heads=16,num_key_value_heads=4,tie_word_embeddings=true}"
)


def machine(host: float, gpu: float = 0, nvme: float = 0) -> MachineMemory:
    """In GiB; without a GPU where it has none."""
    return MachineMemory(gpu > 0, int(host * GIB), int((gpu or host) * GIB), int(nvme * GIB), 16)


def placed(name: str, on: MachineMemory, settings: tuple[str, ...]) -> Placement:
    recipe = load_recipe(RECIPES / f"{name}.toml", (f'train.device="{"cuda" if on.cuda else "cpu"}"', *settings))
    actors = recipe.memory.optimizer_actors or 4
    return place_recipe(recipe, shape_of(recipe), on, optimizer_actors=actors)


def amount(text: str) -> int:
    number, unit = re.search(r"with ([\d.,]+) (MiB|GiB|TiB)", text).groups()  # type: ignore[union-attr]
    return round(float(number.replace(",", "")) * UNITS[unit])


def follow(remedy: str, on: MachineMemory, nvme_dir: Path) -> tuple[MachineMemory, tuple[str, ...]]:
    """The machine and the settings that a remedy asks for."""
    settings: tuple[str, ...] = ()
    for part in remedy.split(" and "):
        part = re.sub(r" \(.*", "", part)
        if part.startswith("a GPU"):
            on = replace(on, gpu_bytes=amount(part))
        elif part.startswith("a machine"):
            on = replace(on, host_bytes=amount(part), gpu_bytes=on.gpu_bytes if on.cuda else amount(part))
        elif part.startswith("memory.nvme_dir"):
            on, settings = replace(on, nvme_bytes=amount(part)), (*settings, f'memory.nvme_dir="{nvme_dir}"')
        elif part.endswith(" left out"):
            settings = (*settings, part.removesuffix(" left out") + "=")
        else:
            assert re.fullmatch(r"[a-z_.]+ = \S+", part), part
            settings = (*settings, part.replace(" ", ""))
    return on, settings


LONG = ("train.sequence_length=65536", "train.sequences_per_step=1", "train.micro_batch=1")
CASES = {
    "host memory": ("qwen2.5-7b", machine(64, 80), ()),
    "a limit on host memory": ("qwen2.5-7b", machine(250, 80), ("memory.ram_gib=40",)),
    "a limit that the machine does not have either": ("qwen2.5-7b", machine(64, 80), ("memory.ram_gib=40",)),
    "a GPU too small": ("qwen2.5-7b", machine(250, 4), ()),
    "a limit on the GPU": ("qwen2.5-7b", machine(250, 80), ("memory.gpu_gib=4",)),
    "a limit on a GPU too small": ("qwen2.5-7b", machine(250, 4), ("memory.gpu_gib=3",)),
    "a micro-batch": ("qwen2.5-7b", machine(250, 24), ("train.micro_batch=64", "train.sequence_length=4096")),
    "too many slots": ("qwen2.5-7b", machine(250, 16), ("memory.decoder_slots=28",)),
    "too many actors": ("qwen2.5-7b", machine(100, 80), ("memory.optimizer_actors=64",)),
    "whole networks": ("qwen2.5-7b", machine(250, 24), (*LONG, "memory.mlp_chunk_tokens=0")),
    "everything": ("qwen2.5-7b", machine(64, 4), ()),
    "too small a drive": ("qwen2.5-7b", machine(64, 80, 5), ()),
    "a limit on the drive": ("qwen2.5-7b", machine(64, 80, 500), ("memory.nvme_gib=5",)),
    "no GPU, little memory": ("qwen2.5-7b", machine(64), (SMALL, "train.micro_batch=64", "train.sequence_length=8192")),
    "no GPU, little memory for state": ("qwen2.5-7b", machine(5), (SMALL, "train.sequence_length=64")),
}


@pytest.mark.parametrize("case", CASES)
def test_every_remedy_makes_it_fit(case: str, tmp_path: Path) -> None:
    name, on, settings = CASES[case]
    nvme = (f'memory.nvme_dir="{tmp_path}"',) if on.nvme_bytes else ("memory.nvme_dir=", "memory.nvme_gib=")
    settings = (*nvme, *settings)
    with pytest.raises(PlacementError) as refused:
        placed(name, on, settings)
    text = str(refused.value)
    single = text.partition("Any one of these makes it fit: ")[2]
    remedies = single.split("; ") if single else [text.partition("these together do: ")[2]]
    for remedy in remedies:
        other, changes = follow(remedy, on, tmp_path)
        placement = placed(name, other, (*settings, *changes))
        preflight(
            placement,
            host_available_bytes=other.host_bytes,
            gpu_free_bytes=other.gpu_bytes,
            nvme_free_bytes=other.nvme_bytes,
        )
    needed = re.search(r"needs ([\d.,]+) (MiB|GiB|TiB)", text)
    assert needed is not None
    for offered in re.findall(r"memory\.(?:ram|gpu|nvme)_gib = ([\d.]+)", single):
        assert case.startswith("no GPU") or float(offered) * GIB >= float(needed[1]) * UNITS[needed[2]]


ONE_BILLION = (
    'model.config={model_type="llama",vocab_size=128256,hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,'
    "num_attention_heads=32,num_key_value_heads=8,head_dim=64,tie_word_embeddings=true}"
)


@pytest.mark.parametrize("gpu_gib", [7, 10.2, 12, 16, 23.5])
@pytest.mark.parametrize("kept", [None, 0])
def test_a_limit_on_host_memory_alone_is_told_with_a_limit_that_fits(kept: int | None, gpu_gib: float) -> None:
    """A small model on a large card: layers that are updated there have no gradients in RAM."""
    settings = (ONE_BILLION, "memory.nvme_dir=", "train.sequences_per_step=16", "train.micro_batch=2")
    settings += () if kept is None else (f"memory.kept_layers={kept}",)
    with pytest.raises(PlacementError) as refused:
        placed("qwen2.5-7b", machine(64, gpu_gib), (*settings, "memory.ram_gib=8"))
    text = str(refused.value)
    offered = re.search(r"memory\.ram_gib = ([\d.]+)", text)
    needed = re.search(r"host memory needs ([\d.]+) GiB", text)
    assert offered is not None and needed is not None and float(offered[1]) == float(needed[1])
    found = placed("qwen2.5-7b", machine(64, gpu_gib), (*settings, f"memory.ram_gib={needed[1]}"))
    assert found.arena_bytes <= float(needed[1]) * GIB


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("config", [ONE_BILLION, SMALL], ids=["one billion", "small"])
def test_the_least_of_any_memory_is_enough_to_the_byte(config: str, place: Place) -> None:
    for sequences, micro_batch in ((1, 1), (16, 2)):
        size = (f"train.sequences_per_step={sequences}", f"train.micro_batch={micro_batch}")
        recipe = load_recipe(RECIPES / "qwen2.5-7b.toml", ("memory.nvme_dir=", config, *size))
        request = request_of(recipe, shape_of(recipe), cuda=True, optimizer_actors=4)
        for gib in (1, 4, 9, 13, 22):
            budget = {
                Place.RAM: MemoryBudget(GIB // 4, gib * GIB),
                Place.DEVICE: MemoryBudget(gib * GIB, GIB // 4),
                Place.NVME: MemoryBudget(gib * GIB, 24 * GIB, 1),
            }[place]
            least = least_of(request, budget, place)
            if least is not None:
                exact = amount_of(least, place)
                key = {Place.RAM: "ram_bytes", Place.DEVICE: "gpu_bytes", Place.NVME: "nvme_bytes"}[place]
                assert isinstance(solve(request, replace(budget, **{key: exact})), Placement), (size, gib)


def remedies_of(case: str, tmp_path: Path) -> str:
    name, on, settings = CASES[case]
    with pytest.raises(PlacementError) as refused:
        placed(name, on, ("memory.nvme_dir=", *settings))
    return str(refused.value)


def test_what_the_machine_does_not_have_is_no_key_to_set(tmp_path: Path) -> None:
    text = remedies_of("a GPU too small", tmp_path)
    assert "memory.gpu_gib" not in text and re.search(r"a GPU with [\d.]+ GiB free, such as one of \d+ GB", text)
    assert "(this one has 4.00 GiB)" in text
    text = remedies_of("host memory", tmp_path)
    assert "memory.ram_gib" not in text and "a machine with" in text and "of 64.00 GiB free" in text


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ("too many slots", r"memory\.decoder_slots = \d+"),
        ("too many actors", r"memory\.optimizer_actors = \d+"),
        ("whole networks", "memory.mlp_chunk_tokens left out"),
        ("a limit on host memory", r"memory\.ram_gib = [\d.]+"),
        ("a limit on the GPU", r"memory\.gpu_gib = [\d.]+"),
    ],
)
def test_the_key_that_asks_for_too_much_is_named(case: str, remedy: str, tmp_path: Path) -> None:
    assert re.search(remedy, remedies_of(case, tmp_path))


@pytest.mark.parametrize("key", ["boundary_every", "decoder_slots"])
def test_more_decoder_layers_than_the_model_has_are_refused_with_their_number(key: str) -> None:
    with pytest.raises(RecipeError, match=rf"memory\.{key} = 29: must not exceed the 28 decoder layers"):
        placed("qwen2.5-7b", machine(500, 80), (f"memory.{key}=29",))
    placed("qwen2.5-7b", machine(500, 141), (f"memory.{key}=28",))


def test_where_the_cpu_stands_in_for_a_gpu_the_host_is_asked_for_its_memory_too() -> None:
    placement = placed("qwen2.5-7b", machine(64), (SMALL, "train.sequence_length=1024", "memory.nvme_dir="))
    device = placement.used(Place.DEVICE)
    terms = {term.name: term.num_bytes for term in placement.terms if term.place is Place.RAM}
    assert terms["in place of device memory"] == device > 0
    enough = placement.used(Place.RAM)
    preflight(placement, host_available_bytes=enough, gpu_free_bytes=enough)
    with pytest.raises(PlacementError, match="host memory: needs"):
        preflight(placement, host_available_bytes=enough - 1, gpu_free_bytes=enough)
    on_gpu = placed("qwen2.5-7b", machine(64, 24), (SMALL, "train.sequence_length=1024", "memory.nvme_dir="))
    assert "in place of device memory" not in {term.name for term in on_gpu.terms}
