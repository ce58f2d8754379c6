"""A whole recipe: its sections together, and what they must agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import model_validator

from pipeline.recipe.errors import InvalidCombinationError, Problem
from pipeline.recipe.sections import (
    CheckpointSection,
    DataSection,
    EvalSection,
    LogSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunSection,
    TrainSection,
)
from pipeline.recipe.values import Section
from pipeline.updates.learning_rate import LearningRate


class Recipe(Section):
    """A whole run, resolved: nothing about it stands anywhere else."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    memory: MemorySection = MemorySection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()

    def learning_rate(self) -> LearningRate:
        """The schedule over the run's steps."""
        optimizer = self.optimizer
        return LearningRate(
            optimizer.schedule,
            optimizer.lr,
            optimizer.warmup_steps,
            self.train.steps,
            optimizer.final_lr_ratio,
            optimizer.decay_steps,
        )

    @property
    def token_cache_dir(self) -> Path:
        """Where token indexes are kept."""
        return self.data.cache_dir or self.run.dir / "data"

    def own_directories(self) -> dict[str, Path]:
        """Directories that the run writes to, by the keys that name them: what they hold is no data."""
        own = {"run.dir": self.run.dir, "data.cache_dir": self.token_cache_dir}
        return own if self.memory.nvme_dir is None else own | {"memory.nvme_dir": self.memory.nvme_dir}

    def with_micro_batch(self, sequences: int) -> Recipe:
        """The recipe with a micro-batch that has been chosen."""
        return self.model_copy(update={"train": self.train.model_copy(update={"micro_batch": sequences})})

    def with_memory(self, **chosen: int | None) -> Recipe:
        """The recipe with keys of `[memory]` that have been chosen."""
        return self.model_copy(update={"memory": self.memory.model_copy(update=chosen)})

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problems = []
        optimizer, steps = self.optimizer, self.train.steps
        if optimizer.warmup_steps > steps:
            problems.append(
                Problem("optimizer.warmup_steps", f"must not exceed train.steps = {steps}", optimizer.warmup_steps)
            )
        elif optimizer.warmup_steps + optimizer.decay_steps > steps:
            want = f"with optimizer.warmup_steps = {optimizer.warmup_steps} must not exceed train.steps = {steps}"
            problems.append(Problem("optimizer.decay_steps", want, optimizer.decay_steps))
        micro_batches = self.train.sequences_per_step // (
            1 if self.train.micro_batch == "auto" else self.train.micro_batch
        )
        if self.memory.waves is not None and self.memory.waves > micro_batches:
            want = f"must not exceed the {micro_batches} micro-batches of a step; lower it or train.micro_batch"
            problems.append(Problem("memory.waves", want, self.memory.waves))
        if self.eval.every_steps and self.data.eval_path is None and self.data.eval_fraction is None:
            want = "needs held-out data: give data.eval_path or data.eval_fraction"
            problems.append(Problem("eval.every_steps", want, self.eval.every_steps))
        if problems:
            raise InvalidCombinationError(*problems)
        return self
