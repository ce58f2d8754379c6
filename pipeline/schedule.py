"""The one place that knows the order of a training step: a pure function from a plan to a graph of operations.

`coordinator` submits the graph as Ray calls, `simulate` prices it, tests walk it. An edge means "may start once that
call has returned"; device work behind a returned call is ordered on the device by streams and events. The parts of the
order are in `streaming_order`, `sum_order` and `update_order`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.step.graph import Graph, Resource
from pipeline.step.operations import Key, Op, Operation
from pipeline.step.schedule_plan import SchedulePlan
from pipeline.step.streaming_order import StreamingOrder
from pipeline.step.sum_order import SumOrder
from pipeline.step.update_order import UpdateOrder

__all__ = ["SchedulePlan", "build_evaluation", "build_snapshot", "build_step"]


def build_step(plan: SchedulePlan, *, checkpoint: bool = False, captures: bool = False) -> tuple[Operation, ...]:
    """Build one training step, in an order of submission in which every operation follows those it waits for.

    Args:
        plan: Placement and clipping.
        checkpoint: Whether every layer is written to a checkpoint after its update.
        captures: Whether the step before did so, and may still be at it.
    """
    # What a slot's first user in a step waits for is the slot's last user in the step before: build once to learn it.
    carried = _step(plan, {}, checkpoint, captures).holders
    return tuple(_step(plan, carried, checkpoint, captures).operations)


def build_snapshot(plan: SchedulePlan) -> tuple[Operation, ...]:
    """Build the writing of a checkpoint between steps. It runs alone, like an evaluation."""
    return tuple(Operation(Key(Op.SNAPSHOT, layer)) for layer in range(plan.num_layers))


def build_evaluation(plan: SchedulePlan) -> tuple[Operation, ...]:
    """Build a pass that only measures the loss. It runs alone: nothing of a training step may be in flight."""
    graph = Graph(plan, {})
    streaming = StreamingOrder(graph, SumOrder(graph))
    streaming.forward_pass()
    streaming.evaluate()
    return tuple(graph.operations)


def _step(plan: SchedulePlan, carried: Mapping[Resource, Key], checkpoint: bool, captures: bool) -> Graph:
    graph = Graph(plan, carried)
    sums = SumOrder(graph)
    streaming = StreamingOrder(graph, sums)
    updates = UpdateOrder(graph, streaming, captures=captures)
    last_wave, middle = plan.waves - 1, plan.head // 2
    for wave in range(last_wave):
        streaming.forward_pass(wave)
        sums.store(plan.head, wave, streaming.head(wave))
        # The embedding's backward waits for the last wave: only then are the sums in the order of a single wave.
        for layer in range(plan.head - 1, 0, -1):
            sums.store(layer, wave, streaming.backward(layer, wave))
    streaming.forward_pass(last_wave)
    head = streaming.head(last_wave)
    if not plan.clip:
        graph.add(Key(Op.LOSS), after=(head,), after_last=(Key(Op.LOSS),))
    if captures and not plan.clip:
        updates.capture(Key(Op.FORWARD, middle, wave=last_wave))
    updates.leave(plan.head, head)
    for layer in range(plan.head - 1, -1, -1):
        last = streaming.backward(layer, last_wave)
        updates.leave(layer, last)
        if captures and plan.clip and layer == middle:
            updates.capture(last)
    graph.add(Key(Op.NORM), after=(last, *(() if plan.clip else (Key(Op.LOSS),))), after_last=(Key(Op.NORM),))
    if plan.clip:
        updates.after_norm()
    if checkpoint:
        updates.snapshot()
    return graph
