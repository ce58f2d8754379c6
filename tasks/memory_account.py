"""The account of memory that a run was placed by, kept in its directory: where every byte lives, term by term."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.memory.footprint import Place, Term
from pipeline.placement import Placement
from tiers.parsing import parse_json

FILE_NAME = "memory.json"
FORMAT_VERSION = 1


class AccountError(ValueError):
    """The account of a run cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Of a run's last start: a resumed run may be placed otherwise."""

    model_type: str
    parameters: int
    terms: tuple[Term, ...]

    @classmethod
    def of(cls, model_type: str, placement: Placement) -> MemoryAccount:
        """Of a run that begins."""
        return cls(model_type, placement.tier.model.num_parameters, placement.terms)

    @classmethod
    def read(cls, run_dir: Path) -> MemoryAccount:
        """Read what a run has kept.

        Raises:
            AccountError: It has kept none, or one of another version.
        """
        path = run_dir / FILE_NAME
        try:
            fields = parse_json(path.read_text(encoding="utf-8"))
            if fields["format_version"] != FORMAT_VERSION:
                raise AccountError(f"{FILE_NAME} is of format {fields['format_version']}, not {FORMAT_VERSION}.")
            terms = tuple(
                Term(Place(term["place"]), str(term["name"]), _counted(term["num_bytes"], least=0), str(term["why"]))
                for term in fields["terms"]
            )
            return cls(str(fields["model_type"]), _counted(fields["parameters"], least=1), terms)
        except FileNotFoundError:
            raise AccountError(f"{FILE_NAME} is missing: an older version wrote the run.") from None
        except AccountError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AccountError(f"{FILE_NAME} cannot be read: {error!r}.") from error

    def as_json(self) -> str:
        """As the file has it."""
        return json.dumps({"format_version": FORMAT_VERSION} | asdict(self), indent=1) + "\n"


def _counted(value: object, *, least: int) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"a size or number is {str(value)[:20]}")
    return value
