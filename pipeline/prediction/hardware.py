"""What a machine can do: rates and sizes, measured by `tasks.probe` or taken from a data sheet. Pure data and TOML.

`simulate` prices a step with it. Rates are what a program gets, not what a sheet promises: GB are 1e9 bytes a second.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tomli_w
from annotated_types import Ge, Gt
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tiers.parsing import parse_toml

GIB = 2**30
_CLOSED = ConfigDict(extra="forbid", allow_inf_nan=False)

Rate = Annotated[float, Gt(0)]


ATTENTION_KEYS = 1024
"""Of sequences over which `attention_efficiency` holds."""


class HardwareError(ValueError):
    """A hardware file cannot be read. The message names the file and every key that is wrong."""


NO_GPU = "CPU"


@dataclass(frozen=True, config=_CLOSED)
class Device:
    """The GPU, or the CPU that stands in for one: then its name is NO_GPU."""

    name: str
    memory_gib: Rate
    """What a program can allocate."""
    gemm_tflops: Rate
    """Large bf16 matrix products with fp32 sums, 1e12 operations a second."""
    memory_gbps: Rate
    """Sustained reads and writes of device memory."""
    layer_efficiency: Annotated[float, Gt(0)] = 0.905
    """Rate of a decoder layer's matrix products on many tokens, and of the head's, as a share of `gemm_tflops`. Norms,
    attention and other work between them is no part of it. Default: fitted to steps and layers of 3B, 7B and 14B on
    an H200."""
    attention_efficiency: Annotated[float, Gt(0)] = 0.25
    """Rate of attention forward and backward over sequences of ATTENTION_KEYS tokens, as a share of `gemm_tflops`.
    Default: fitted to the same; `tasks.probe` measures it."""
    long_attention_efficiency: Annotated[float, Ge(0)] = 0.0
    """What that rate grows towards over longer sequences; 0: not known, taken not to grow."""
    product_tail: Annotated[float, Ge(0)] = 1.1e6
    """Outputs that a matrix product costs beyond its own, whatever its size: on average its last round of tiles leaves
    part of the device idle. What makes small micro-batches slow. Default: an assumption, a quarter of a round of
    128 x 256 tiles on the 132 multiprocessors of an H200; `tasks.probe` measures it."""
    pass_s: Annotated[float, Ge(0)] = 3e-4
    """Least seconds of one micro-batch's way forward through a layer, which the host needs to launch it; the way back
    takes three times that. Default: an assumption, for compiled layers."""

    @property
    def memory_bytes(self) -> int:
        """Allocatable bytes."""
        return int(self.memory_gib * GIB)

    def attention_efficiency_over(self, keys: int) -> float:
        """Rate of attention over so many keys, as a share of `gemm_tflops`.

        An operation takes as long as one of an endless sequence, and what a token costs beside its keys: that is
        shared by as many operations as there are keys.
        """
        if not self.long_attention_efficiency:
            return self.attention_efficiency
        endless, short = 1 / self.long_attention_efficiency, 1 / self.attention_efficiency
        return 1 / (endless + (short - endless) * min(1.0, ATTENTION_KEYS / keys))


@dataclass(frozen=True, config=_CLOSED)
class Link:
    """The way between host and device, from and to pinned memory."""

    to_device_gbps: Rate
    """Alone."""
    to_host_gbps: Rate
    """Alone."""
    both_ways_gbps: Rate
    """Each way, while the other is busy too."""


@dataclass(frozen=True, config=_CLOSED)
class Host:
    """Processor and memory."""

    cores: Annotated[int, Gt(0)]
    memory_gib: Rate
    """What one run may use: the smaller of the machine's and the control group's."""
    copy_gbps: Rate
    """Reads plus writes of a copy by all cores."""
    update_gparams_per_s: Rate
    """AdamW on the split master by all optimizers together, while nothing else works; 1e9 parameters a second."""
    update_busy_gparams_per_s: Rate
    """The same while the GPU computes and DMA runs both ways: they share the memory."""

    @property
    def memory_bytes(self) -> int:
        """Bytes one run may use."""
        return int(self.memory_gib * GIB)


@dataclass(frozen=True, config=_CLOSED)
class Nvme:
    """The drives behind one directory, O_DIRECT, sustained."""

    capacity_gb: Annotated[float, Ge(0)]
    """Free for a run."""
    read_gbps: Rate
    write_gbps: Rate
    """After any fast cache of the drive is full: a tier writes without end."""
    read_busy_gbps: Rate
    """While it writes too."""
    write_busy_gbps: Rate
    """While it reads too."""
    endurance_tb: Annotated[float, Ge(0)] = 0.0
    """Terabytes that the maker rates for writing (TBW); 0 where unknown."""


@dataclass(frozen=True, config=_CLOSED)
class Hardware:
    """One machine."""

    name: str
    origin: str
    """`measured ...` or `data sheets`: how far to trust it."""
    device: Device
    link: Link
    host: Host
    nvme: Nvme | None = None
    """None: no drive; all state must fit RAM."""


_ADAPTER = TypeAdapter(Hardware)


def load_hardware(path: Path) -> Hardware:
    """Read a hardware file.

    Raises:
        HardwareError: It cannot be read, is no TOML, or has missing, unknown or impossible values.
    """
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        shipped = ", ".join(sorted(each.stem for each in SHIPPED.glob("*.toml")))
        raise HardwareError(
            f"{path}: no such hardware file; `tasks.probe --out FILE` makes one; shipped: {shipped}"
        ) from error
    except (OSError, ValueError) as error:
        raise HardwareError(f"{path}: cannot be read as TOML: {error}") from error
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise HardwareError(f"{path}: {problems}") from error


def find_hardware(name: str) -> Path:
    """Path of a hardware file: `name` as a path, else as the name of a shipped one.

    Raises:
        HardwareError: `name` is empty, as of a variable that is not set.
    """
    if not name:
        raise HardwareError("a hardware file has no name: got '', give a path or the name of a shipped one")
    shipped = SHIPPED / f"{name}.toml"
    return shipped if shipped.exists() and not Path(name).exists() else Path(name)


def hardware_toml(hardware: Hardware) -> str:
    """The machine as TOML that `load_hardware` reads back as an equal one."""
    values = {key: value for key, value in asdict(hardware).items() if value is not None}
    return tomli_w.dumps(values)


SHIPPED = Path(__file__).parents[2] / "tasks" / "recipes" / "hardware"
"""Hardware files that come with the project."""
