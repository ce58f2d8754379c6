"""What Compute is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.updates.adamw import OptimizerSettings
from pipeline.updates.learning_rate import LearningRate


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """How one process computes. The placement and the recipe decide; Compute only obeys."""

    learning_rate: LearningRate
    max_grad_norm: float | None
    """None: no global clipping, and the loss alone decides whether a step is applied."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    decoder_slots: int = 2
    """Device slots for the weights of decoder layers; 2 is double buffering."""
    outgoing_buffers: int = 2
    """Device buffers for finished gradients."""
    compile: bool = False
    """Compile the layer templates: worth it on CUDA only."""
    head_chunk_tokens: int = 4096
    """Tokens whose logits exist at once: fp32 logits of 152,064 words take 2.5 GB then."""
    mlp_chunk_tokens: int = 0
    """Most tokens that pass the feed-forward network of a recomputed layer at once; 0 for a whole micro-batch."""
    kept_layers: int = 0
    """Decoder layers, the last ones, that keep their graph from forward to backward."""
    own_slots: int = 0
    """Decoder layers, the last ones, that have a device slot each, beside those that are shared."""
    boundary_every: int = 1
    """Of the recomputed decoder layers one in so many keeps its input for the backward."""
    waves: int = 1
    """Parts of a step's micro-batches that pass all layers one after another."""
    device_updates: tuple[int, ...] = ()
    """Layers that are updated on the device, in the slots that they lie in when a step ends. Only with clipping."""
    optimizer: OptimizerSettings | None = None
    """Of those updates."""
    deterministic: bool = False
    """Same bits in every run on the same GPU, for a slower backward of attention. The CPU always is."""
    record_spans: bool = True
    """Time every operation: two events each."""
    threads: int = 1
    """CPU threads of torch; on CUDA they only prepare work."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        for name in ("decoder_slots", "outgoing_buffers", "head_chunk_tokens", "boundary_every", "waves", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mlp_chunk_tokens < 0:
            raise ValueError(f"mlp_chunk_tokens must be at least 0, got {self.mlp_chunk_tokens}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, got {self.max_grad_norm}; leave it out for no clipping")
        if self.device_updates and (self.max_grad_norm is None or self.optimizer is None):
            raise ValueError("updates on the device need clipping, which is what they save time with, and an optimizer")
