"""What of a recipe is refused or remarked on once its model and machine are known."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.recipe import Recipe
from pipeline.recipe.errors import Problem, raise_problems
from pipeline.recipe.sections import MemorySection


def check_layers(recipe: Recipe, decoders: int) -> None:
    """Refuse more layers than there are: a key would be taken for something else than it says.

    Args:
        recipe: What is to be trained.
        decoders: Decoder layers of its model.

    Raises:
        RecipeError: A key of `[memory]` counts more of them.
    """
    memory = recipe.memory
    # The default of slots is good for a model of one layer too.
    limits = (
        ("boundary_every", memory.boundary_every, decoders),
        ("decoder_slots", memory.decoder_slots, max(decoders, MemorySection().decoder_slots)),
    )
    want = f"must not exceed the {decoders} decoder layers of the model; lower it, or leave it out"
    raise_problems(
        f"the recipe of {recipe.run.name}",
        [Problem(f"memory.{key}", want, value) for key, value, most in limits if value is not None and value > most],
    )


def check_threads(recipe: Recipe, threads: int, cores: int) -> None:
    """Refuse more optimizer threads than a machine can have a use for.

    Args:
        recipe: What is to be trained.
        threads: Of all optimizer actors together.
        cores: Of the machine.

    Raises:
        RecipeError: There are more, for each core, than any waiting makes up for.
    """
    most = max(LEAST_THREADS, MOST_THREADS_A_CORE * cores)
    if threads > most:
        memory = recipe.memory
        key, value = (
            ("memory.threads_per_actor", memory.threads_per_actor)
            if memory.threads_per_actor is not None
            else ("memory.optimizer_actors", memory.optimizer_actors)
        )
        want = f"makes {threads} optimizer threads, on {cores} cores at most {most}; lower it, or leave it out"
        raise_problems(f"the recipe of {recipe.run.name}", [Problem(key, want, value)])


LEAST_THREADS = 64
"""That every machine takes, for recipes that were made for a larger one."""

MOST_THREADS_A_CORE = 4


def beyond_positions(recipe: Recipe, config: Mapping[str, object]) -> str | None:
    """What to say of sequences longer than the model was made for; None where they are not.

    Args:
        recipe: What is to be trained.
        config: Fields of the model's Hugging Face configuration.
    """
    length, positions = recipe.train.sequence_length, config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    reach = float(positions)
    if isinstance(scaling, Mapping):
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", positions)
        if isinstance(factor, int | float) and isinstance(original, int | float):
            reach = max(reach, factor * original)
    if length <= reach:
        return None
    return (
        f"train.sequence_length = {length:,} is above the model's max_position_embeddings = {positions:,}: pretrained "
        "weights have not seen such positions, and programs that load an export may cut sequences there"
    )


def checkpoint_at_the_end(recipe: Recipe) -> str | None:
    """What to say of a recipe that saves nothing on the way; None where it does."""
    if 0 < recipe.checkpoint.every_steps < recipe.train.steps:
        return None
    return (
        f"the only checkpoint is that of the last step, {recipe.train.steps:,}, or of a stop: a crash, a kill or a "
        "loss of power before loses the run; set checkpoint.every_steps"
    )
