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

GIB = 2**30


def show(reports: Mapping[str, object]) -> None:
    """Print every report."""
    roof = reports.get("roof")
    for report in reports.values():
        match report:
            case RoofReport():
                print(f"roof          {report.step_s:8.3f} s a step  {report.model_tflops:7.1f} model TFLOP/s")
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
    print(f"step          {steps.step_s:8.3f} s a step  {steps.model_tflops:7.1f} model TFLOP/s{share}")
    print(f"tokens        {steps.tokens:,} a step, {steps.tokens_per_s:,.0f} a second")
    print("busy          " + ", ".join(f"{lane} {share:.0%}" for lane, share in sorted(steps.lanes.items())))
    print("stalls        " + ", ".join(f"{k} {v:.3f} s" for k, v in dataclasses.asdict(steps.stalls).items()))
    print(f"updates       {steps.update_gparams_per_s:.2f} Gparam/s while at work")
    host = f"{steps.host_bytes / GIB:.1f} GiB ({steps.host_bytes / steps.parameters:.2f} bytes a parameter)"
    print(f"memory        device peak {steps.gpu_peak_bytes / GIB:.1f} GiB, host {host}")
    if steps.nvme_read_bytes:
        read, written = steps.nvme_read_bytes / 1e9, steps.nvme_write_bytes / 1e9
        print(f"NVMe          {read:.1f} GB read, {written:.1f} GB written a step")
    print(f"first step    {steps.first_step_s:.1f} s after the start")
    print(f"compiled      {steps.compiled_graphs} graphs, {steps.compiled_late} of them after the warm-up")


def _comparison(figures: tuple[Figure, ...]) -> None:
    print(f"\n{'':34}{'plan':>12}{'measured':>12}{'plan above':>12}")
    for figure in figures:
        scale, unit = (GIB, "GiB") if figure.unit == "bytes" else (1.0, "s")
        predicted, measured = (f"{value / scale:.2f} {unit}" for value in (figure.predicted, figure.measured))
        beyond = "" if figure.violation is None else "  beyond its limits"
        print(f"{figure.name:34}{predicted:>12}{measured:>12}{figure.excess:>+12.1%}{beyond}")


def _tier(report: TierReport) -> None:
    mode = "O_DIRECT" if report.o_direct else "through the page cache: this file system refuses O_DIRECT"
    print(
        f"{report.layers} layers of {report.parameters_per_layer:,} parameters, {report.bytes_per_round / 1e9:.1f} GB "
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
    spanned = f"{report.spanned_step_s:.3f} s over the {report.spanned_steps:g} that it spans"
    beside = report.host_peak_bytes - report.host_bytes
    print(f"\ncheckpoint, compression {report.compression}, median of {len(report.rounds)}")
    print(f"written       {report.num_bytes / 1e9:.2f} GB in {report.seconds:.2f} s, {report.gbps:.2f} GB/s")
    print(f"step          {report.step_s:.3f} s without, {spanned}")
    print(f"overhead      {report.overhead:+.1%} of these (rounds: {each})")
    print(f"lost          {report.lost_s:.2f} s: 5 % of a run with one every {report.steps_for_5_percent} steps")
    print(
        f"host peak     {report.host_peak_bytes / GIB:.2f} GiB with, {report.host_bytes / GIB:.2f} without: "
        f"{beside / GIB:+.3f} GiB beside a state of {report.state_bytes / GIB:.2f}"
    )


def _control(report: ControlReport) -> None:
    alone = f"without Ray, nothing overlapping, {report.inline_step_s * 1e3:.2f} ms"
    idle = f"{report.idle_s * 1e3:.2f} ms a step in which no lane works ({report.idle_s / report.step_s:.1%})"
    per = f"{report.idle_per_operation_s * 1e3:.3f} ms for each of {report.operations} operations"
    print(f"\nstep          {report.step_s * 1e3:.2f} ms; {alone}")
    print(f"idle          {idle}: {per}, which are {report.calls} calls")
    print(f"submission    {report.submit_s * 1e3:.2f} ms a step of the driver's time")
    print(f"empty call    {report.call_s * 1e3:.2f} ms there and back, {report.streamed_call_s * 1e3:.2f} in a stream")
