"""What became of the user's rows, for people to read before training starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataReport:
    """Rows -> documents -> sequences -> tokens. `tokens + dropped_tokens` are all tokens of `documents`."""

    num_files: int
    rows: int
    """Rows read from all files, good and bad; a text file is one row."""
    rows_left_out: tuple[tuple[str, int], ...]
    """(reason, rows) that gave no document."""
    rows_without_labels: int
    """Rows of token ids without labels: every token but the first is a target."""
    documents: int
    """Documents on this side of the held-out split."""
    documents_left_out: tuple[tuple[str, int], ...]
    """(reason, documents) that were left out of the packing."""
    documents_split: int
    documents_truncated: int
    documents_without_target: int
    """Documents packed though no token of theirs is a target; they cost time and teach nothing."""
    sequence_length: int
    sequences: int
    tokens: int
    """Real tokens in the sequences."""
    supervised_tokens: int
    """Targets in the sequences."""
    padding_tokens: int
    dropped_tokens: int
    """Tokens cut off or left out by the policy for long documents."""

    def __str__(self) -> str:
        lines = [
            f"{_counted(self.num_files, 'file')}, {_counted(self.rows, 'row')} -> "
            f"{_counted(self.documents, 'document')} -> {_counted(self.sequences, 'sequence')} of "
            f"{self.sequence_length:,} -> {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} of them targets; {self.padding_tokens:,} padding "
            f"({self.padding_tokens / max(1, self.sequences * self.sequence_length):.1%})"
        ]
        lines += [f"  rows left out: {count:,} {reason}" for reason, count in self.rows_left_out]
        lines += [f"  documents left out: {count:,} {reason}" for reason, count in self.documents_left_out]
        notes = (
            (self.documents_split, "documents longer than a sequence were split, every token kept"),
            (self.documents_truncated, "documents were truncated to a sequence"),
            (self.dropped_tokens, "tokens were dropped with long documents"),
            (self.documents_without_target, "documents have no target: all their labels are ignored"),
            (self.rows_without_labels, "rows of token ids have no labels: every token but the first is a target"),
        )
        lines += [f"  {count:,} {note}" for count, note in notes if count]
        return "\n".join(lines)


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
