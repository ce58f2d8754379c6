"""What `tasks.plan` finds: figures of one recipe on one machine. Reads nothing, allocates nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby

from pipeline.memory.footprint import Place
from pipeline.placement import Placement
from pipeline.prediction.checkpoint_pace import CheckpointPace
from pipeline.prediction.simulate import Prediction
from tasks.checkpoint_room import CheckpointFigures
from tasks.plan_advice import Advice
from tiers.arena_map import LayerHome

SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class HomeRange:
    """Consecutive layers whose bytes live in the same tiers."""

    first: str
    last: str
    layers: int
    parameters: int
    """Of all these layers together."""
    weights: str
    state: str
    gradients: str


@dataclass(frozen=True)
class TimeFigures:
    """What follows from a predicted step."""

    prediction: Prediction
    tokens: int
    """Of a step."""
    steps: int | None
    """Of the recipe; None where the token budget was given."""
    token_budget: int
    advice: tuple[Advice, ...]
    """What would make it faster."""
    price_per_hour: float | None
    endurance_tb: float
    checkpoint: CheckpointPace | None
    """None without a drive whose rates are known, and where checkpoints are compressed."""

    @property
    def tokens_per_day(self) -> float:
        """At the predicted pace."""
        return self.tokens / self.prediction.step_s * SECONDS_A_DAY

    @property
    def days(self) -> float:
        """For the token budget."""
        return self.token_budget / self.tokens_per_day

    @property
    def cost(self) -> float | None:
        """For the token budget, in the price's currency."""
        return None if self.price_per_hour is None else self.days * 24 * self.price_per_hour

    @property
    def drive_days(self) -> float | None:
        """Days until the drive has written what its maker rates it for; None where it is not written or not known."""
        if not self.endurance_tb or not self.prediction.nvme_write_bytes:
            return None
        return self.endurance_tb * 1e12 / (self.prediction.nvme_write_bytes / self.prediction.step_s * SECONDS_A_DAY)


@dataclass(frozen=True)
class Plan:
    """The answer for one recipe on one machine."""

    recipe: str
    machine: str
    parameters: int
    reason: str | None
    """Why memory does not suffice and what would."""
    placement: Placement
    """Where memory does not suffice, the placement of a machine with enough of everything."""
    checkpoints: CheckpointFigures
    notes: tuple[str, ...]
    """What keeps the recipe from being trained although it can be planned, its family or data that is not there; and
    what is worth knowing of its model."""
    time: TimeFigures | None
    """None where the machine's rates are not known, or the model does not fit."""

    @property
    def fits(self) -> bool:
        """Whether `tasks.train` would begin."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it does not fit and what makes it fit: memory, then disk."""
        return tuple(reason for reason in (self.reason, self.checkpoints.refusal) if reason is not None)

    def as_json(self) -> dict[str, object]:
        """Plain values, sizes in bytes and times in seconds."""
        time = self.time
        return {
            "recipe": self.recipe,
            "machine": self.machine,
            "parameters": self.parameters,
            "fits": self.fits,
            "reason": "\n".join(self.reasons) or None,
            "notes": list(self.notes),
            "micro_batch": self.placement.step.micro_batch,
            "mlp_chunk_tokens": self.placement.mlp_chunk_tokens,
            "boundary_every": self.placement.schedule.boundary_every,
            "waves": self.placement.schedule.waves,
            "spilled_boundaries": self.placement.spilled_boundaries,
            "terms": [asdict(term) for term in self.placement.terms],
            "total_bytes": {place.value: self.placement.used(place) for place in Place},
            "budget_bytes": asdict(self.placement.budget),
            "homes": [asdict(each) for each in home_ranges(self.placement)],
            "checkpoints": asdict(self.checkpoints),
            "time": None if time is None else _time_json(time),
        }


def _time_json(time: TimeFigures) -> dict[str, object]:
    prediction = time.prediction
    return {
        "step_s": prediction.step_s,
        "tokens_per_s": time.tokens / prediction.step_s,
        "model_tflops": prediction.model_tflops,
        "lanes": {load.lane.value: {"busy_s": load.busy_s, "critical_s": load.critical_s} for load in prediction.lanes},
        "bottleneck": prediction.bottleneck.value,
        "compute_waits_s": {lane.value: seconds for lane, seconds in prediction.stalls},
        "nvme_read_bytes": prediction.nvme_read_bytes,
        "nvme_write_bytes": prediction.nvme_write_bytes,
        "tokens_per_day": time.tokens_per_day,
        "token_budget": time.token_budget,
        "days": time.days,
        "cost": time.cost,
        "drive_days": time.drive_days,
        "checkpoint": None if time.checkpoint is None else asdict(time.checkpoint),
        "advice": [asdict(each) for each in time.advice],
    }


def home_ranges(placement: Placement) -> list[HomeRange]:
    """Where weights, state and gradients of every layer live, runs of equal layers together."""
    clip = placement.schedule.clip
    pairs = list(zip(placement.tier.model.layers, placement.tier.homes, strict=True))
    ranges = []
    for _, run in groupby(pairs, key=lambda pair: (pair[0].kind, _tiers_of(pair[1], clip))):
        members = list(run)
        weights, state, gradients = _tiers_of(members[0][1], clip)
        ranges.append(
            HomeRange(
                first=members[0][0].name,
                last=members[-1][0].name,
                layers=len(members),
                parameters=sum(layer.num_parameters for layer, _ in members),
                weights=weights,
                state=state,
                gradients=gradients,
            )
        )
    return ranges


def _tiers_of(home: LayerHome, clip: bool) -> tuple[str, str, str]:
    """Where weights, state and gradient of a layer live."""
    held = "device" if home.gradient_on_device else "RAM"
    return (
        "RAM" if home.weight_slot is None else "NVMe",
        "RAM" if home.state_slot is None else "NVMe",
        f"{held}, held to the norm" if clip else "RAM, a few slots",
    )
