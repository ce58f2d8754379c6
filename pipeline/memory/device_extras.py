"""What device memory that nothing needs is used for: first against waiting, then against recompute. Pure policy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiers.arena_map import LayerHome

KEPT_SHARE = 0.7
"""Of what a compiled layer would keep for the fastest backward, the most that it keeps: no normalised input and no
product of gate and up, which cost little to compute again. Qwen2.5 7B on an H200, bf16: 152 KB a token become 99, and
forward plus backward take 37.5 instead of 38.2 ms for 16,384 tokens (45.6 with recompute)."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Layers that more device memory makes faster."""

    device_updates: tuple[int, ...] = ()
    """Updated on the device, as `SchedulePlan` says."""
    kept_layers: int = 0
    """Decoder layers, the last ones, that are not recomputed."""
    extra_slots: int = 0
    """Shared decoder slots beyond those asked for: more layers lie on the device when a step ends."""
    in_lent_room: int = 0
    """Decoder layers whose activations make room for lent state, as `SchedulePlan` says."""
    own_slots: int = 0
    """Of the kept layers, those whose weights are streamed only once."""


NO_EXTRAS = Extras()


EXTRA_SLOTS = 6
"""Of 7B at 65,536 tokens a step on an H200 machine the host's updates take as long as the forward that they overlap,
and one layer of 28 is 3.5 % of them. With five on the device (and the embedding) the head waited for nothing on a day
when the host updated 4.9 G parameters a second, and 33 ms a step when it updated 4.2, with six 38 ms where all layers
are recomputed: two more are for such days. By prediction they lengthen no step by more than a millisecond, and each
takes 0.06 bytes a parameter off the host."""


def choose_extras(
    homes: Sequence[LayerHome],
    fits: Callable[[Extras], bool],
    *,
    decoder_slots: int,
    updates: bool,
    kept_layers: int | None,
) -> Extras:
    """Choose the most that fits, in order of gain a byte.

    Of 7B on an H200, 65,536 tokens a step, updates on the device save 4 % of a step for 11 GiB; a layer that is not
    recomputed saves 0.6 % for 7 GiB.

    Args:
        homes: Of all layers. Only state at home in RAM is lent to the device.
        fits: Whether the device holds what it must and the given extras too.
        decoder_slots: Decoder layers that lie in shared slots when a step ends.
        updates: Whether layers may be updated on the device at all: there is a GPU, and with clipping it would wait.
        kept_layers: The most decoder layers to keep; None for as many as fit.
    """
    decoders = len(homes) - 2

    def updated(extra_slots: int) -> tuple[int, ...]:
        ends_in_slot = range(min(decoder_slots + extra_slots, decoders) + 1) if updates else range(0)
        return tuple(layer for layer in ends_in_slot if homes[layer].state_slot is None)

    def with_room(extras: Extras) -> Extras | None:
        """The same with as few layers in the room of lent state as do: the forward of the first waits until it is free.

        None where no number does.
        """
        # Above all layers that are updated here, whose gradients come into that room as soon as there are any.
        most = min(decoders // 2, decoders - max(extras.device_updates)) if extras.device_updates else 0
        if not fits(replace(extras, in_lent_room=most)):
            return None
        return next(each for layers in range(most + 1) if fits(each := replace(extras, in_lent_room=layers)))

    first_choice = [Extras(updated(extra), extra_slots=extra) for extra in range(EXTRA_SLOTS, 0, -1)]
    fewer = [Extras(updated(0)[:count]) for count in range(len(updated(0)), 0, -1)]
    choices = (*(first_choice if updates else ()), *fewer)
    chosen = next((roomy for extras in choices if (roomy := with_room(extras))), NO_EXTRAS)
    most = decoders if kept_layers is None else min(kept_layers, decoders)
    for count in range(most, 0, -1):
        if roomy := with_room(replace(chosen, kept_layers=count)):
            return _with_own_slots(roomy, fits)
    return chosen


def _with_own_slots(chosen: Extras, fits: Callable[[Extras], bool]) -> Extras:
    """The same with as many slots as there is room for left: they only spare the link, which has time in most runs."""
    counts = range(chosen.kept_layers + 1)
    most = bisect_left(counts, True, key=lambda count: not fits(replace(chosen, own_slots=count))) - 1
    return replace(chosen, own_slots=most)
