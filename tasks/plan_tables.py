"""Tables of a plan, for people. Each term of memory stands on a line of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.memory.footprint import TIER_NAMES, Place
from pipeline.placement import Placement, boundaries_in_words
from pipeline.prediction.checkpoint_pace import CheckpointPace
from tasks.plan_report import SECONDS_A_DAY, HomeRange, Plan, TimeFigures, home_ranges
from tiers.quantities import shown_bytes, shown_count, shown_duration

WORTH_TELLING = 0.001
"""Share of a step from which on a wait is named."""


def tables(plan: Plan) -> str:
    """The plan for people."""
    lines = [
        f"{plan.recipe} on {plan.machine}: {shown_count(plan.parameters)} parameters",
        f"fits: {'yes' if plan.fits else 'NO'}",
    ]
    lines += [f"note: {note}" for note in plan.notes]
    step = plan.placement.step
    lines.append(f"micro-batch: {step.micro_batch} of {step.sequences} sequences a step")
    lines.append(f"boundary activations: {boundaries_in_words(plan.placement)}")
    if plan.placement.mlp_chunk_tokens:
        lines.append(f"feed-forward networks: {plan.placement.mlp_chunk_tokens:,} tokens at a time")
    lines += plan.reasons
    if plan.reason:
        lines.append("\nOn a machine with enough of everything it would take:")
    for place in Place:
        lines += ["", *_account(plan.placement, place, not plan.reason)]
    lines += ["", *_bytes_per_parameter(plan)]
    lines += ["", "where it lives", *_homes(plan.placement)]
    if plan.time is not None:
        lines += ["", *_time(plan.time)]
    elif plan.fits:
        lines += [
            "",
            "step time: not predicted, this machine's rates are unknown; run `python -m tasks.probe --out",
            "machine.toml` and pass --hardware machine.toml",
        ]
    lines += ["", *_checkpoints(plan)]
    return "\n".join(lines)


def _account(placement: Placement, place: Place, fits: bool) -> Iterator[str]:
    terms = [term for term in placement.terms if term.place is place]
    budget = placement.budget
    allowed = {
        Place.RAM: f"; model state {shown_bytes(placement.arena_bytes)} of {shown_bytes(budget.ram_bytes)}",
        Place.DEVICE: f" of {shown_bytes(budget.gpu_bytes)}",
        Place.NVME: f" of {shown_bytes(budget.nvme_bytes)}",
    }[place]
    yield f"{TIER_NAMES[place]}: {shown_bytes(placement.used(place))}{allowed if fits else ''}"
    yield from _table([[f"  {term.name}", shown_bytes(term.num_bytes), term.why] for term in terms if term.num_bytes])


def _bytes_per_parameter(plan: Plan) -> Iterator[str]:
    def per(num_bytes: int) -> str:
        return f"{num_bytes / plan.parameters:.2f}"

    placement = plan.placement
    yield (
        f"bytes a parameter: host {per(placement.used(Place.RAM))} (model state {per(placement.arena_bytes)}), "
        f"device {per(placement.used(Place.DEVICE))}, NVMe {per(placement.used(Place.NVME))}"
    )


def _homes(placement: Placement) -> Iterator[str]:
    heading = ["  layers", "parameters", "weights", "master low, moments", "gradients"]
    yield from _table([heading, *_merged(home_ranges(placement))])


def _merged(ranges: Sequence[HomeRange]) -> list[list[str]]:
    """Rows of ranges; a pattern that alternates (state of every third layer on NVMe) becomes a row for each kind."""
    if len(ranges) <= 8:
        return [_row(_name(each), each.parameters, each) for each in ranges]
    rows: dict[tuple[str, ...], list[HomeRange]] = {}
    for each in ranges:
        decoder = each.first.startswith("layer-")
        key = ("layers" if decoder else each.first, each.weights, each.state, each.gradients)
        rows.setdefault(key, []).append(each)
    merged = []
    for (name, *_), members in rows.items():
        count = sum(each.layers for each in members)
        label = f"{count} layers, spread" if name == "layers" and len(members) > 1 else _name(members[0])
        merged.append(_row(label, sum(each.parameters for each in members), members[0]))
    return merged


def _name(each: HomeRange) -> str:
    return each.first if each.layers == 1 else f"{each.first} to {each.last.removeprefix('layer-')}"


def _row(label: str, parameters: int, each: HomeRange) -> list[str]:
    return [f"  {label}", shown_count(parameters), each.weights, each.state, each.gradients]


def _time(time: TimeFigures) -> Iterator[str]:
    prediction = time.prediction
    speed = shown_count(time.tokens / prediction.step_s)
    yield (
        f"step: {shown_duration(prediction.step_s)} for {time.tokens:,} tokens = {speed} tokens/s, "
        f"{shown_count(prediction.model_tflops)} model TFLOP/s; bottleneck: {prediction.bottleneck}"
    )
    rows = [["  lane", "busy", "share", "of the step's length"]]
    for load in prediction.lanes:
        if load.busy_s:
            share = f"{load.busy_s / prediction.step_s:.0%}"
            rows.append([f"  {load.lane}", shown_duration(load.busy_s), share, shown_duration(load.critical_s)])
    yield from _table(rows)
    least_s = prediction.step_s * WORTH_TELLING
    waits = ", ".join(f"{lane} {shown_duration(wait_s)}" for lane, wait_s in prediction.stalls if wait_s >= least_s)
    yield f"  the device waits for: {waits or 'nothing'}"
    if prediction.nvme_write_bytes or prediction.nvme_read_bytes:
        life = f"; its rated writes last {time.drive_days:,.0f} days of training" if time.drive_days else ""
        read, written = shown_bytes(prediction.nvme_read_bytes), shown_bytes(prediction.nvme_write_bytes)
        yield f"  the drive reads {read} and writes {written} a step{life}"
    for each in time.advice:
        yield f"  {each.speedup:.2f} times as many tokens a second with {each.setting} ({each.but})"
    what = f"the recipe's {time.steps:,} steps" if time.steps else f"{shown_count(time.token_budget)} tokens"
    yield f"tokens a day: {shown_count(time.tokens_per_day)}; {what} take {shown_duration(time.days * SECONDS_A_DAY)}"
    if time.cost is not None:
        yield f"cost at {time.price_per_hour:g} an hour: {time.cost:,.2f}"


def _checkpoints(plan: Plan) -> Iterator[str]:
    figures = plan.checkpoints
    free = "" if figures.free_bytes is None else f", free there {shown_bytes(figures.free_bytes)}"
    there = "" if figures.missing_bytes == figures.needed_bytes else f", of it {shown_bytes(figures.missing_bytes)} new"
    yield (
        f"checkpoints: {shown_bytes(figures.bytes_each)} each, at most {figures.kept} at a time (the old one goes when "
        f"the new one is complete) = {shown_bytes(figures.needed_bytes)}{there}{free}"
    )
    if plan.time is not None and plan.time.checkpoint is not None:
        yield f"  {_pace(plan.time.checkpoint)}"


def _pace(pace: CheckpointPace) -> str:
    written = f"one takes {shown_duration(pace.write_s)} or more to write, at {pace.write_gbps:.3g} GB/s"
    if not pace.every_steps:
        return f"{written}; no step follows"
    share = f"{pace.wait_share:.1%}" if pace.wait_share >= WORTH_TELLING else "less than 0.1%"
    waits = f"{shown_duration(pace.wait_s)} ({share})"
    if pace.too_often:
        return f"{written}, longer than {pace.every_steps:,} steps, which wait {waits}: raise checkpoint.every_steps"
    if not pace.wait_s:
        return f"{written}, beside steps that do not wait for the drive"
    more = (
        f"; with checkpoint.staging_gib = {pace.enough_staging_gib} for copies alone" if pace.enough_staging_gib else ""
    )
    return f"{written}, for which every {pace.every_steps:,} steps wait {waits}{more}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns aligned: the first and the last to the left, figures between them to the right."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < column < len(row) - 1 and cell[:1].isdigit() else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
