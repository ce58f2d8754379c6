"""Reports of measurements as lines for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tasks.bench.checkpoint import CheckpointReport
from tasks.bench.comparison import Figure
from tasks.bench.control import ControlReport
from tasks.bench.optimizer import OptimizerReport
from tasks.bench.roof import RoofReport
from tasks.bench.step import StepReport
from tasks.bench.tier import TierReport
from tiers.host_memory import SHMEM_HUGE_PAGES
from tiers.quantities import shown_bytes, shown_count, shown_duration


def show(reports: Mapping[str, object]) -> None:
    """Print every report."""
    roof = reports.get("roof")
    for report in reports.values():
        match report:
            case RoofReport():
                print(f"roof          {shown_duration(report.step_s)}  {report.model_tflops:.1f} model TFLOP/s")
            case StepReport():
                _step(report, roof if isinstance(roof, RoofReport) else None)
            case TierReport():
                _tier(report)
            case OptimizerReport():
                _optimizer(report)
            case CheckpointReport():
                _checkpoint(report)
            case ControlReport():
                _control(report)
            case tuple():
                _comparison(report)


def _step(steps: StepReport, roof: RoofReport | None) -> None:
    share = f"  {steps.model_tflops / roof.model_tflops:.1%} of the roof" if roof else ""
    print(f"step          {shown_duration(steps.step_s)}  {steps.model_tflops:.1f} model TFLOP/s{share}")
    print(f"tokens        {steps.tokens:,} a step, {shown_count(steps.tokens_per_s)} a second")
    print("busy          " + ", ".join(f"{lane} {share:.0%}" for lane, share in sorted(steps.lanes.items())))
    stalls = dataclasses.asdict(steps.stalls).items()
    print("stalls        " + ", ".join(f"{cause} {shown_duration(seconds)}" for cause, seconds in stalls))
    for gap in steps.gaps:
        print(f"idle          {shown_duration(gap.seconds)} a step from {gap.before} to {gap.after}")
    print(f"updates       {steps.update_gparams_per_s:.2f} Gparam/s while at work")
    host = f"{shown_bytes(steps.host_bytes)} ({steps.host_bytes / steps.parameters:.2f} bytes a parameter)"
    print(f"memory        device peak {shown_bytes(steps.gpu_peak_bytes)}, host {host}")
    if steps.nvme_read_bytes:
        read, written = shown_bytes(steps.nvme_read_bytes), shown_bytes(steps.nvme_write_bytes)
        print(f"NVMe          {read} read, {written} written a step")
    print(f"first step    {shown_duration(steps.first_step_s)} after the start")
    print(f"compiled      {steps.compiled_graphs} graphs, {steps.compiled_late} of them after the warm-up")


def _comparison(figures: tuple[Figure, ...]) -> None:
    print(f"\n{'':34}{'plan':>12}{'measured':>12}{'plan above':>12}")
    for figure in figures:
        shown = shown_bytes if figure.unit == "bytes" else shown_duration
        beyond = "" if figure.violation is None else "  beyond its limits"
        print(
            f"{figure.name:34}{shown(figure.predicted):>12}{shown(figure.measured):>12}{figure.excess:>+12.1%}{beyond}"
        )


def _tier(report: TierReport) -> None:
    mode = "O_DIRECT" if report.o_direct else "through the page cache: this file system refuses O_DIRECT"
    print(
        f"{report.layers} layers of {report.parameters_per_layer:,} parameters, {shown_bytes(report.bytes_per_round)} "
        f"a round, median of {report.rounds}, {report.threads} threads, {mode}, arena "
        f"{'in huge pages' if report.huge_pages else f'in 4 KiB pages ({SHMEM_HUGE_PAGES} allows no others)'}"
    )
    print(f"{'':14}{'tier':>12}{'raw':>12}{'of raw':>9}{'CPU':>14}{'raw CPU':>14}")
    for name in ("store_state", "load_state", "load_weights"):
        each = getattr(report, name)
        print(
            f"{name:14}{each.gbps:>7.2f} GB/s{each.raw_gbps:>7.2f} GB/s{each.of_raw:>9.1%}"
            f"{each.cpu_s_per_gb:>9.3f} s/GB{each.raw_cpu_s_per_gb:>9.3f} s/GB"
        )
    print(f"plain zarr reads the same values from all {report.zarr_shards_equal} shards")


def _optimizer(report: OptimizerReport) -> None:
    print(f"{report.parameters:,} parameters a round, {report.cores} cores")
    for rate in report.rates:
        print(
            f"{rate.actors:3} actors x {rate.threads:2} threads  {rate.gparams_per_s:6.2f} Gparam/s  "
            f"{rate.gbps:6.1f} GB/s of host memory"
        )


def _checkpoint(report: CheckpointReport) -> None:
    each = ", ".join(f"{one.overhead:+.1%}" for one in report.rounds)
    spanned = f"{shown_duration(report.spanned_step_s)} over the {report.spanned_steps:g} that it spans"
    beside = report.host_peak_bytes - report.host_bytes
    print(f"\ncheckpoint, compression {report.compression}, median of {len(report.rounds)}")
    every = f"a run with one every {report.steps_for_5_percent} steps"
    print(f"lost          {shown_duration(report.lost_s)}: 5 % of {every}")
    print(f"step          {shown_duration(report.step_s)} without, {spanned}")
    print(f"overhead      {report.overhead:+.1%} of these (rounds: {each})")
    print(
        f"complete      after {shown_duration(report.seconds)}; {shown_bytes(report.num_bytes)}, {report.gbps:.2f} GB/s"
    )
    print(
        f"host peak     {shown_bytes(report.host_peak_bytes)} with, {shown_bytes(report.host_bytes)} without: "
        f"{'-' if beside < 0 else '+'}{shown_bytes(abs(beside))} beside a state of {shown_bytes(report.state_bytes)}, "
        f"of which {shown_bytes(report.staging_bytes)} may be copied"
    )


def _control(report: ControlReport) -> None:
    alone = f"without Ray, nothing overlapping, {shown_duration(report.inline_step_s)}"
    idle = f"{shown_duration(report.idle_s)} a step in which no lane works ({report.idle_s / report.step_s:.1%})"
    per = f"{shown_duration(report.idle_per_operation_s)} for each of {report.operations} operations"
    print(f"\nstep          {shown_duration(report.step_s)}; {alone}")
    print(f"idle          {idle}: {per}, which are {report.calls} calls")
    print(f"submission    {shown_duration(report.submit_s)} a step of the driver's time")
    call, streamed = shown_duration(report.call_s), shown_duration(report.streamed_call_s)
    print(f"empty call    {call} there and back, {streamed} in a stream")
