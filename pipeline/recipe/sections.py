"""Every key of a recipe, with its type, unit, limits, default and the reason for the default.

`recipe.load_recipe` builds these from TOML; the rest of the program reads them and never writes. Values are checked
here, at the edge, and trusted inside. Whether files exist is checked by whoever opens them: a plan may be made for a
machine that holds neither model nor data.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import Field, JsonValue, model_validator

from pipeline.recipe.errors import InvalidCombinationError, Problem
from pipeline.recipe.values import (
    Actors,
    Beta,
    Count,
    CountOrOff,
    Gibibytes,
    GibibytesOrNone,
    Place,
    Places,
    Section,
    Threads,
)
from pipeline.updates.learning_rate import ScheduleKind
from tiers.layout import ElementType, Precision


class RunSection(Section):
    """`[run]`: what the run is called, where it is kept, and how it goes on after a stop or a fault."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Shown in logs and gauges. Default: the recipe file's name without its ending."""
    dir: Place
    """The run's directory: recipe, metrics, events, checkpoints. Default: `~/megatrain/NAME`, because a Ray job works
    in a copy of its directory that Ray deletes."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Of the initial weights and the order of the data."""
    resume: Literal["auto", "never"] | Place = "auto"
    """auto: from the newest complete checkpoint in `dir`, or from the start where none ever was; never: from the
    start, refusing a `dir` that holds one; a path: from that checkpoint, each time (after a stop, auto goes on)."""
    accept_changes: tuple[str, ...] = ()
    """Keys, as `section.key`, that may differ from the checkpoint's recipe although they change what is learned.
    Default none: a changed schedule or data path at resume is more often a slip than a wish."""
    max_recoveries: CountOrOff = 3
    """Times that a lost actor may be replaced by going back to the last checkpoint; 0 fails at once. Default 3: enough
    for accidents, few enough that a fault that always returns ends the run."""


class ModelSection(Section):
    """`[model]`: pretrained weights, or a configuration to start from random ones. Exactly one of the two."""

    source: Place | None = None
    """Hugging Face model directory: config.json and safetensors; or a store that `tasks.import_hf` made of one."""
    config: Place | dict[str, JsonValue] | None = None
    """Path to a config.json, or the same as a table `[model.config]`; the weights start random."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.source is None) == (self.config is None):
            got = "neither" if self.source is None else "both"
            raise InvalidCombinationError(
                Problem(
                    "model.source",
                    f"give exactly one of model.source (pretrained) and model.config (random start), got {got}",
                )
            )
        return self


class ColumnNames(Section):
    """`[data.columns]`: what the columns of tokenised rows are called."""

    input_ids: Annotated[str, MinLen(1)] = "input_ids"
    """Token ids of a document."""
    labels: str = "labels"
    """Targets as in Hugging Face: not shifted, -100 where not supervised. Rows without them supervise every token but
    the first of a document; an empty name does so for all rows."""


class DataSection(Section):
    """`[data]`: what is read, and what becomes of rows that do not fit."""

    path: Places
    """File, directory or glob, or a list of them, read in the order given. Directories are searched whole, through
    links too, without names that begin with a dot and without what the run writes itself: `run.dir`, `data.cache_dir`
    and `memory.nvme_dir` may lie inside. What cannot be read there is refused."""
    eval_path: Places | None = None
    """Held-out data of its own."""
    eval_fraction: Annotated[float, Gt(0), Lt(1)] | None = None
    """Share of the documents of `path` that is held out instead, chosen by content and seed."""
    format: Literal["auto", "text", "jsonl", "parquet", "arrow"] = "auto"
    """auto: by the files' endings."""
    suffixes: tuple[str, ...] = ()
    """Patterns of the file names to take from directories, e.g. `*.py`. Default: the endings of the format."""
    text_field: Annotated[str, MinLen(1)] = "text"
    """Field or column that holds the text of rows that are not tokenised."""
    columns: ColumnNames = ColumnNames()
    """Names of the columns of tokenised rows."""
    tokenizer: Literal["bytes"] | Place = "bytes"
    """bytes: the 256 byte values; a path: a Hugging Face tokenizer directory. Unused by tokenised rows."""
    append_eos: bool = True
    """End each text document with the tokenizer's end token, so that the model learns to stop."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Null, empty or unreadable rows; skipped ones are counted in the report. Default error: bad rows are news."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """Documents longer than a sequence: pieces that keep every token, the beginning only, or left out. Default split:
    nothing is lost."""
    shuffle: bool = True
    """A new seeded order of the sequences in each epoch."""
    cache_dir: Place | None = None
    """Where token indexes are kept between runs. Default: inside the run's directory."""

    @model_validator(mode="after")
    def _one_held_out_set(self) -> Self:
        if self.eval_path is not None and self.eval_fraction is not None:
            raise InvalidCombinationError(
                Problem("data.eval_fraction", "data.eval_path is given too; give one of them")
            )
        return self


class TrainSection(Section):
    """`[train]`: how much is computed."""

    steps: Count
    """Optimizer steps of the whole run, skipped ones included. The end of the data starts its next epoch: no step is
    short."""
    sequence_length: Annotated[int, Ge(2), Le(2**24)]
    """Tokens a sequence."""
    sequences_per_step: Annotated[int, Ge(1), Le(2**20)]
    """Sequences that make one optimizer step; a multiple of `micro_batch`."""
    micro_batch: Count | Literal["auto"] = "auto"
    """Sequences computed at once: more run faster and hold more activations; the result differs by rounding alone.
    auto: of those that fit the one whose step the plan predicts to be the shortest, by the figures of `--hardware` or
    else of the shipped machine that is most like this one; a resumed run keeps its checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    compile: bool = True
    """Compile the layers on CUDA, which makes 7B a fifth faster (H200); the CPU never compiles."""
    max_skipped_in_a_row: CountOrOff = 5
    """Steps skipped for a non-finite loss or gradient, one after another, before the run fails."""

    @property
    def sequences_at_once(self) -> int:
        """`micro_batch`, which the plan must have chosen."""
        assert self.micro_batch != "auto", "no micro-batch has been chosen"
        return self.micro_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.sequences_per_step // self.sequences_at_once

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.micro_batch != "auto" and self.sequences_per_step % self.micro_batch:
            raise InvalidCombinationError(
                Problem(
                    "train.sequences_per_step",
                    f"must be a multiple of train.micro_batch = {self.micro_batch}",
                    self.sequences_per_step,
                )
            )
        return self


class OptimizerSection(Section):
    """`[optimizer]`: AdamW as in `torch.optim.AdamW`, and the learning rate over the steps."""

    lr: Annotated[float, Gt(0)] = 1e-5
    """Highest learning rate. Default: usual for full fine-tuning; a random start wants about 3e-4."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the two moments. Default: 0.95 and not 0.999, as large language models are trained since GPT-3."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled; for matrices, the embedding included, never for norms and biases."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Global L2 norm that gradients are clipped to; 0 turns clipping off, and updates then start during backward."""
    schedule: ScheduleKind = "cosine"
    """constant, linear, cosine, or wsd: stable with a linear fall over the last `decay_steps`."""
    warmup_steps: CountOrOff = 0
    """Steps of linear rise; step 1 uses lr / warmup_steps."""
    final_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Where the schedule falls to, as a share of `lr`; `constant` does not fall."""
    decay_steps: CountOrOff = 0
    """Length of the fall of wsd."""

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> Self:
        if (self.schedule == "wsd") != (self.decay_steps > 0):
            want = "wsd needs at least 1" if self.schedule == "wsd" else 'only schedule = "wsd" uses it; remove it'
            raise InvalidCombinationError(Problem("optimizer.decay_steps", want, self.decay_steps))
        return self


class MemorySection(Section):
    """`[memory]`: budgets and workers. What is left out is taken from the machine."""

    ram_gib: Gibibytes | None = None
    """Host memory for model state, GiB. Default: what is free, less a reserve."""
    nvme_dir: Place | None = None
    """Directory on a local NVMe drive for what RAM does not hold. Default: none, all state in RAM."""
    nvme_gib: Gibibytes | None = None
    """Most that may be written there, GiB. Default: the free space, less a reserve."""
    gpu_gib: Gibibytes | None = None
    """Device memory to use, GiB. Default: what is free, less a reserve."""
    optimizer_actors: Actors | None = None
    """Default: from the core count."""
    threads_per_actor: Threads | None = None
    """Threads of each optimizer actor. Default: from the core count, in at most four actors: fewer calls a step."""
    prefetch_threads: Threads = 4
    """Threads that move bytes between NVMe and RAM."""
    decoder_slots: Count = 2
    """Device slots that decoder layers stream through. Default 2: double buffering; 1 saves a layer's bytes."""
    device_updates: bool = True
    """With clipping, update the layers that the next step reads first on the GPU, where it has room for their state."""
    kept_layers: CountOrOff | None = None
    """Most decoder layers that keep weights and activations on the device instead of being recomputed; 0 recomputes
    all. Default: as many as it has room for; a resumed run on CUDA, where their sums round otherwise, its checkpoint's
    number if there is room for as many."""
    boundary_every: Count | None = None
    """Of so many recomputed decoder layers one keeps its input for the backward, which makes those of the others anew:
    less to hold, up to an eighth more to compute a step. Default: chosen by the plan. No bit depends on it."""
    waves: Annotated[int, Ge(1), Le(64)] | None = None
    """Parts of a step's micro-batches that pass all layers one after another: less to hold, weights streamed again for
    each, and 2 bytes a parameter more in RAM (4 without clipping) for fp32 gradient sums. Default: chosen by the plan,
    1 wherever the boundary activations of a whole step have room. No bit depends on it."""
    mlp_chunk_tokens: CountOrOff | None = None
    """Tokens that pass a recomputed layer's feed-forward network at a time; 0: a micro-batch, whole. Default: chunks of
    2,048 to 16,384 where a layer at work would not fit the device otherwise, or where the plan predicts a shorter step
    since they push less out of it: of one long sequence most of what a layer holds is that network's. A resumed run
    keeps its checkpoint's: sums round otherwise."""

    @model_validator(mode="after")
    def _budget_has_a_place(self) -> Self:
        if self.nvme_gib is not None and self.nvme_dir is None:
            raise InvalidCombinationError(
                Problem("memory.nvme_gib", "memory.nvme_dir says where, and is not given", self.nvme_gib)
            )
        return self


class PrecisionSection(Section):
    """`[precision]`: types of weights and gradients. Master and moments are always fp32, and so is accumulation."""

    mode: Literal["bf16", "fp32"] = "bf16"
    """bf16: stream and compute in bf16, the high half of an fp32 master; fp32: all in fp32, for exact comparison."""
    gradients: Literal["auto", "bf16", "fp32"] = "auto"
    """Type in which a layer's summed gradient crosses to the host. auto: the mode's."""

    @property
    def precision(self) -> Precision:
        """The mode as the tiers name it."""
        return Precision(self.mode)

    @property
    def gradient_type(self) -> ElementType:
        """Element type of the gradient slots."""
        kind = self.mode if self.gradients == "auto" else self.gradients
        return ElementType.BFLOAT16 if kind == "bf16" else ElementType.FLOAT32

    @model_validator(mode="after")
    def _exact_mode_is_exact(self) -> Self:
        if self.mode == "fp32" and self.gradients == "bf16":
            raise InvalidCombinationError(
                Problem("precision.gradients", 'precision.mode = "fp32" needs "fp32" or "auto"', self.gradients)
            )
        return self


class CheckpointSection(Section):
    """`[checkpoint]`: a last one is always written at the end of a run and when it is stopped."""

    every_steps: CountOrOff = 0
    """0: only at the end. Default 0: what a checkpoint costs depends on the model and the disk; see `tasks.plan`."""
    keep_last: Count = 2
    """Newest ones that stay. Default 2: the older one remains should the newest prove unreadable."""
    keep_every: CountOrOff = 0
    """Those of steps that are multiples of this stay for ever; 0: none."""
    compression: Literal["none", "zstd"] = "none"
    """Default none: at disk speed zstd costs more time than it saves; it is for archives."""
    staging_gib: GibibytesOrNone | None = None
    """Most host memory, GiB, for copies of what is not written yet when the next step updates it; with 0 that update
    waits. Default: what the model leaves of `memory.ram_gib`, at most half of the state in RAM: the drive then has two
    steps for a checkpoint that holds up none."""


class EvalSection(Section):
    """`[eval]`: loss on held-out data."""

    every_steps: CountOrOff = 0
    """0: never. Otherwise also after the last step."""
    sequences: Count | None = None
    """Sequences of each evaluation, the same every time. Default: all held-out ones."""


class LogSection(Section):
    """`[log]`: what is shown and recorded besides metrics.jsonl, which has every step."""

    every_s: Annotated[float, Ge(0)] = 0.0
    """Least seconds between console lines; 0: a line every step."""
    events_max_mib: CountOrOff = 64
    """Spans of operations are recorded in events.jsonl until it has this size, MiB; 0: none. Default: some thousand
    steps of a 7B model (about 25 KiB a step)."""
