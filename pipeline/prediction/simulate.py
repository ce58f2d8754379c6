"""Predicts a step by running its very graph on priced lanes, without a machine: pure.

Operations start as soon as what they wait for is done and their lane is free, in the order of submission where several
could: what the actors and streams do. A few steps are run one after another until their length no longer depends on the
first one's empty pipeline.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.messages import Lane
from pipeline.prediction.costs import CALL_S, RIVALS, Cost, CostModel
from pipeline.schedule import build_step
from pipeline.step.operations import Key, Op

WARM_UP_STEPS = 3
MEASURED_STEPS = 2


class LaneLoad(NamedTuple):
    """What a lane does in a steady step."""

    lane: Lane
    busy_s: float
    critical_s: float
    """Of its busy time, what the step's length consists of: making it faster makes the step shorter."""


@dataclass(frozen=True)
class Prediction:
    """A steady step."""

    step_s: float
    lanes: tuple[LaneLoad, ...]
    waiting_s: float
    """Of the step's length, calls between actors."""
    stalls: tuple[tuple[Lane, float], ...]
    """Seconds that the compute lane idles, by the lane that it waits for."""
    model_tflops: float
    nvme_read_bytes: int
    nvme_write_bytes: int

    @property
    def bottleneck(self) -> Lane:
        """The lane that most of the step's length consists of."""
        return max(self.lanes, key=lambda load: load.critical_s).lane


def simulate(costs: CostModel) -> Prediction:
    """Predict the steady step of a placement."""
    run = _Run(costs)
    run.finish()
    last = run.steps - 1
    end = run.end_of_step(last)
    start = run.end_of_step(last - MEASURED_STEPS)
    step_s = (end - start) / MEASURED_STEPS
    critical, waiting_s = run.critical(run.last_of_step(last), start, end)
    stalls = run.stalls(start, end)
    window = [node for node in run.nodes if node.cost is not None and node.start_s < end and node.end_s > start]
    loads = []
    for lane in Lane:
        busy = sum(_overlap(node, start, end) for node in window if node.cost and node.cost.lane is lane)
        loads.append(LaneLoad(lane, busy / MEASURED_STEPS, critical.get(lane, 0.0) / MEASURED_STEPS))
    moved = dict.fromkeys(Lane, 0)
    for cost in run.prices:
        if cost is not None:
            moved[cost.lane] += cost.num_bytes
    return Prediction(
        step_s=step_s,
        lanes=tuple(loads),
        waiting_s=waiting_s / MEASURED_STEPS,
        stalls=tuple((lane, seconds / MEASURED_STEPS) for lane, seconds in stalls.items() if seconds > 0),
        model_tflops=costs.model_flops() / step_s / 1e12,
        nvme_read_bytes=moved[Lane.NVME_READ],
        nvme_write_bytes=moved[Lane.NVME_WRITE],
    )


def least_step_s(costs: CostModel) -> float:
    """What the busiest lane does in a step where none disturbs it: no step is shorter. Cheaper than `simulate`."""
    busy = dict.fromkeys(Lane, 0.0)
    for operation in build_step(costs.placement.schedule):
        cost = costs.cost(operation.key)
        if cost is not None:
            busy[cost.lane] += cost.alone_s
    return max(busy.values())


@dataclass(slots=True)
class _Node:
    """An operation of one of the steps."""

    key: Key
    cost: Cost | None
    order: int
    missing: int = 0
    """Predecessors that are not done."""
    ready_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    cause: int = -1
    """Node whose end let this one start: the latest predecessor, or the lane's operation before."""


_LATE = frozenset(
    {Op.OFFLOAD, Op.LOSS, Op.NORM, Op.UPDATE, Op.RETURN_STATE, Op.LOAD_WEIGHTS, Op.LOAD_STATE, Op.STORE_STATE}
)
"""Operations that return at their end, so that a follower learns of it by a call; the device orders the others."""


class _Run:
    """All steps as one graph, and the state of the lanes."""

    steps = WARM_UP_STEPS + MEASURED_STEPS

    def __init__(self, costs: CostModel) -> None:
        self.schedule = costs.placement.schedule
        self.operations = build_step(self.schedule)
        self.prices = [costs.cost(operation.key) for operation in self.operations]
        count = len(self.operations)
        index = {operation.key: place for place, operation in enumerate(self.operations)}
        self.nodes: list[_Node] = []
        self.followers: list[list[int]] = [[] for _ in range(count * self.steps)]
        for step in range(self.steps):
            for place, operation in enumerate(self.operations):
                node = _Node(operation.key, self.prices[place], step * count + place)
                before = [step * count + index[key] for key in operation.after]
                if step:
                    before += [(step - 1) * count + index[key] for key in operation.after_last if key in index]
                node.missing = len(before)
                for each in before:
                    self.followers[each].append(node.order)
                self.nodes.append(node)
        self._ready: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        self._last_on: dict[Lane, int] = {}
        self._working: dict[Lane, int] = {}
        self._events: list[tuple[float, int, bool]] = []

    def finish(self) -> None:
        """Run every step to its end."""
        for node in self.nodes:
            if node.missing == 0:
                self._push(node.order, 0.0)
        now = 0.0
        while self._events:
            now, order, ends = heapq.heappop(self._events)
            if ends:
                self._end(order)
            else:
                self._arrive(order)
            # Everything that happens at this moment is known before a lane chooses.
            if not self._events or self._events[0][0] > now:
                self._start_lanes(now)
        assert all(node.missing == 0 for node in self.nodes), "the graph waits on itself"

    def _push(self, order: int, at_s: float) -> None:
        self.nodes[order].ready_s = at_s
        heapq.heappush(self._events, (at_s, order, False))

    def _arrive(self, order: int) -> None:
        node = self.nodes[order]
        if node.cost is None:
            node.start_s = node.end_s = node.ready_s
            self._release(order)
        else:
            heapq.heappush(self._ready[node.cost.lane], order)

    def _end(self, order: int) -> None:
        cost = self.nodes[order].cost
        assert cost is not None
        del self._working[cost.lane]
        self._last_on[cost.lane] = order
        self._release(order)

    def _release(self, order: int) -> None:
        node = self.nodes[order]
        # A stage from a RAM slot that is loaded anew returns when the slot has been read.
        late = node.key.op in _LATE or (
            node.key.op is Op.STAGE and self.schedule.weight_slot(node.key.layer) is not None
        )
        delay_s = CALL_S if late else 0.0
        for follower in self.followers[order]:
            waiting = self.nodes[follower]
            waiting.missing -= 1
            at_s = node.end_s + delay_s
            if at_s >= waiting.ready_s:
                waiting.ready_s, waiting.cause = at_s, order
            if waiting.missing == 0:
                self._push(follower, waiting.ready_s)

    def _start_lanes(self, now: float) -> None:
        for lane, ready in self._ready.items():
            if lane in self._working or not ready:
                continue
            order = heapq.heappop(ready)
            node = self.nodes[order]
            assert node.cost is not None
            contended = any(rival in self._working for rival in RIVALS[lane])
            node.start_s = now
            node.end_s = now + (node.cost.busy_s if contended else node.cost.alone_s)
            if lane in self._last_on and self.nodes[self._last_on[lane]].end_s > node.ready_s:
                node.cause = self._last_on[lane]
            self._working[lane] = order
            heapq.heappush(self._events, (node.end_s, order, True))

    def last_of_step(self, step: int) -> int:
        """Node that ends a step's device work: the gradient of the embedding, on which loss and norm follow."""
        count = len(self.operations)
        return max(range(step * count, (step + 1) * count), key=lambda order: self._device_end(order))

    def _device_end(self, order: int) -> float:
        return self.nodes[order].end_s if self.nodes[order].key.op is Op.BACKWARD else -1.0

    def end_of_step(self, step: int) -> float:
        """When the step's device work is over."""
        return self.nodes[self.last_of_step(step)].end_s

    def critical(self, order: int, start_s: float, end_s: float) -> tuple[dict[Lane, float], float]:
        """Seconds by lane of the chain of causes that leads to a node, and those between them, within a window."""
        seconds: dict[Lane, float] = {}
        for node in self._chain(order, start_s):
            if node.cost is not None:
                seconds[node.cost.lane] = seconds.get(node.cost.lane, 0.0) + _overlap(node, start_s, end_s)
        return seconds, max(0.0, end_s - start_s - sum(seconds.values()))

    def stalls(self, start_s: float, end_s: float) -> dict[Lane, float]:
        """Idle seconds of the compute lane within a window, by the lane whose work it waited for."""
        seconds: dict[Lane, float] = {}
        device = sorted(
            (node for node in self.nodes if node.cost is not None and node.cost.lane is Lane.COMPUTE),
            key=lambda node: node.start_s,
        )
        for before, after in itertools.pairwise(device):
            gap_start, gap_end = max(before.end_s, start_s), min(after.start_s, end_s)
            if gap_end <= gap_start:
                continue
            for node in self._chain(after.order, gap_start):
                if node is not after and node.cost is not None:
                    lane = node.cost.lane
                    seconds[lane] = seconds.get(lane, 0.0) + _overlap(node, gap_start, gap_end)
        return seconds

    def _chain(self, order: int, start_s: float) -> Iterator[_Node]:
        """A node and its causes, back to `start_s`."""
        while order >= 0 and self.nodes[order].end_s > start_s:
            yield self.nodes[order]
            order = self.nodes[order].cause


def _overlap(node: _Node, start_s: float, end_s: float) -> float:
    return max(0.0, min(node.end_s, end_s) - max(node.start_s, start_s))
