"""Sizes that an account and a prediction need besides the layout: of activations, of a step, of the run's processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.step.waves import largest_wave, micro_batches_of
from tiers.layout import LayerLayout


@dataclass(frozen=True, slots=True)
class ComputeShape:
    """What a token passes through: sizes of the activations, which no parameter count tells."""

    hidden_size: int
    intermediate_size: int
    """Width of one feed-forward network (one expert of a mixture)."""
    query_size: int
    """Attention heads x head size."""
    kv_size: int
    """Key-value heads x head size."""
    head_size: int
    vocab_size: int
    num_experts: int = 1
    experts_per_token: int = 1
    attention_window: int | None = None
    """Positions a token attends to at most, averaged over the layers; None means the whole sequence."""

    @classmethod
    def of_config(cls, config: Mapping[str, object]) -> ComputeShape:
        """Read the sizes out of a Hugging Face `config.json`.

        Raises:
            ValueError: A size is missing or no integer.
        """
        heads = _integer(config, "num_attention_heads")
        hidden = _integer(config, "hidden_size")
        head_dim = _integer(config, "head_dim", hidden // heads)
        experts = _integer(config, "num_local_experts", _integer(config, "num_experts", 1))
        intermediate = _integer(config, "intermediate_size", 4 * hidden)
        return cls(
            hidden_size=hidden,
            intermediate_size=_integer(config, "moe_intermediate_size", intermediate) if experts > 1 else intermediate,
            query_size=heads * head_dim,
            kv_size=_integer(config, "num_key_value_heads", heads) * head_dim,
            head_size=head_dim,
            vocab_size=_integer(config, "vocab_size"),
            num_experts=experts,
            experts_per_token=_integer(config, "num_experts_per_tok", 1) if experts > 1 else 1,
        )

    def active_parameters(self, layer: LayerLayout) -> int:
        """Parameters of `layer` that multiply one token: experts count only where the token is routed to them."""
        active = 0
        for tensor in layer.tensors:
            share = self.experts_per_token / self.num_experts if ".experts." in tensor.name else 1.0
            active += round(tensor.numel * share)
        return active


def _integer(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model config: `{key}` must be a positive integer, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many tokens a step holds and how they pass the device."""

    sequence_length: int
    sequences: int
    """Of a whole step."""
    micro_batch: int
    """Sequences that pass a layer at a time."""

    @property
    def tokens(self) -> int:
        """Positions of a step, padding included."""
        return self.sequence_length * self.sequences

    @property
    def micro_batch_tokens(self) -> int:
        """Positions that pass a layer at a time."""
        return self.sequence_length * min(self.micro_batch, self.sequences)

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return -(-self.sequences // self.micro_batch)

    def in_wave(self, wave: int, waves: int) -> StepShape:
        """What is left of a step when only the micro-batches of one wave are counted."""
        part = len(micro_batches_of(wave, waves, self.micro_batches))
        return self if waves == 1 else replace(self, sequences=part * self.micro_batch)

    def largest_wave(self, waves: int) -> StepShape:
        """That of the wave with most micro-batches."""
        part = largest_wave(waves, self.micro_batches)
        return self if waves == 1 else replace(self, sequences=part * self.micro_batch)


@dataclass(frozen=True, slots=True)
class ProcessShape:
    """The processes of a run, which hold memory of their own beside the arena."""

    optimizer_actors: int = 4
    cuda: bool = True
    compiled: bool = True
    """Templates are compiled: Inductor's worker processes live beside Compute."""
    timed_bytes: int = 0
    """Of the largest activation that a compiled kernel changes in place: see `host_footprint`."""
