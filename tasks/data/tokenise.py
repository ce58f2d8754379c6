"""Reads every source file into a token cache, or opens the cache that an earlier run has written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tasks.data.cache_writer import CacheWriter
from tasks.data.checks import BlockChecker
from tasks.data.columns import read_columnar_file
from tasks.data.fingerprint import fingerprint
from tasks.data.progress import TokenisationProgress
from tasks.data.rows import RowTally, TextRow, TokenBlock
from tasks.data.settings import DataError, DataSettings
from tasks.data.sources import SourceFile, find_files
from tasks.data.text_rows import read_jsonl_file, read_text_file
from tasks.data.token_cache import TokenCache, open_cache, storage_dtype
from tasks.data.tokenizers import BytesTokenizer, Tokenizer, open_tokenizer

BATCH_TEXT_BYTES = 4 << 20
"""Text tokenised in one call: enough for the threads of a fast tokenizer, about 50 MB of ids and lists."""
SCAN_TOKENS = 1 << 24

logger = logging.getLogger(__name__)


def tokenise(
    settings: DataSettings, *, vocab_size: int, cache_dir: Path, report: Callable[[str], None] | None = None
) -> TokenCache:
    """Give the tokens of all documents.

    Args:
        settings: the user's.
        vocab_size: rows of the model's embedding; every id must be below.
        cache_dir: where caches live; made if absent.
        report: told a line every few seconds.

    Raises:
        DataError: the data cannot be read, or no document is left.
    """
    files = find_files(settings)
    dtype = storage_dtype(vocab_size)
    directory = cache_dir / fingerprint(settings, files, dtype.str)
    cache = open_cache(directory)
    if cache is None:
        cache = _Tokenisation(settings, files, vocab_size, report).write(directory, dtype)
    else:
        logger.info("reusing %s tokens of %s", f"{cache.header.num_tokens:,}", directory)
    _check_vocabulary(cache, vocab_size)
    return cache


class _Tokenisation:
    """One pass over the files."""

    def __init__(
        self,
        settings: DataSettings,
        files: tuple[SourceFile, ...],
        vocab_size: int,
        report: Callable[[str], None] | None,
    ) -> None:
        self._settings = settings
        self._files = files
        self._vocab_size = vocab_size
        self._tally = RowTally(settings.on_bad_row)
        self._progress = TokenisationProgress(sum(file.num_bytes for file in files), report)
        self._tokenizer: Tokenizer | None = None

    def write(self, directory: Path, dtype: np.dtype[np.generic]) -> TokenCache:
        checker = BlockChecker(self._files, self._vocab_size)
        with CacheWriter(directory, dtype) as writer:
            for block in self._blocks():
                checker.check(block)
                writer.add(block)
                self._progress.wrote(len(block.ids))
            checker.finish()
            if writer.empty_documents:
                self._tally.dropped["no token"] += writer.empty_documents
            if writer.num_documents == 0:
                raise no_documents(self._settings, self._tally.rows, tuple(self._tally.dropped.items()))
            writer.publish(
                tokenizer_vocabulary_size=self._tokenizer.vocabulary_size if self._tokenizer else 0,
                bytes_tokenised=isinstance(self._tokenizer, BytesTokenizer),
                files=tuple(str(file.path) for file in self._files),
                rows=self._tally.rows,
                rows_without_labels=self._tally.rows_without_labels,
                dropped=tuple(sorted(self._tally.dropped.items())),
            )
        cache = open_cache(directory)
        if cache is None:
            raise DataError(f"the token cache {directory} was written but cannot be opened; is its disk full?")
        return cache

    def _blocks(self) -> Iterator[TokenBlock]:
        """Yield the tokens of all files in order; consecutive text rows are tokenised together."""
        texts: list[TextRow] = []
        num_bytes = 0
        for item in self._items():
            if isinstance(item, TextRow):
                texts.append(item)
                num_bytes += len(item.text)
                if num_bytes < BATCH_TEXT_BYTES:
                    continue
            if texts:
                yield self._encode(texts)
                texts, num_bytes = [], 0
            if isinstance(item, TokenBlock):
                yield item
        if texts:
            yield self._encode(texts)

    def _items(self) -> Iterator[TextRow | TokenBlock]:
        settings, files, tally, advance = self._settings, self._files, self._tally, self._progress.advance
        for file, source in enumerate(files):
            try:
                if source.format == "text":
                    needs_utf8 = self._open_tokenizer().needs_utf8
                    yield from read_text_file(files, file, tally, needs_utf8=needs_utf8, advance=advance)
                elif source.format == "jsonl":
                    yield from read_jsonl_file(files, file, settings, tally, advance=advance)
                else:
                    needs_utf8 = settings.tokenizer != "bytes"
                    yield from read_columnar_file(files, file, settings, tally, needs_utf8=needs_utf8, advance=advance)
            except OSError as error:
                raise DataError(f"{source.path} cannot be read: {error.strerror or error}") from error

    def _open_tokenizer(self) -> Tokenizer:
        """Load the tokenizer at the first text: rows of token ids need none."""
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._settings)
            check_tokenizer(self._tokenizer.vocabulary_size, self._vocab_size)
        return self._tokenizer

    def _encode(self, texts: list[TextRow]) -> TokenBlock:
        tokenizer = self._open_tokenizer()
        parts: list[np.ndarray] = []
        lengths = []
        for text, ids in zip(texts, tokenizer.encode([text.text for text in texts]), strict=True):
            begin = tokenizer.begin if text.starts_document else ()
            end = tokenizer.end if text.ends_document else ()
            if end and len(ids) and ids[-1] == end[0]:
                end = ()  # the text says so itself
            parts += [np.array(begin, dtype=np.int64), ids, np.array(end, dtype=np.int64)]
            lengths.append(len(begin) + len(ids) + len(end))
        return TokenBlock(
            file=np.array([text.file for text in texts]),
            row=np.array([text.row for text in texts]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            ids=np.concatenate(parts),
            ends=np.array([text.ends_document for text in texts]),
        )


def check_tokenizer(tokenizer_size: int, vocab_size: int) -> None:
    """Refuse a tokenizer larger than the model's vocabulary. A smaller one is usual: embeddings are padded.

    Raises:
        DataError: it is larger.
    """
    if tokenizer_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer_size} tokens, the model's vocabulary {vocab_size}; "
            "use the model's own tokenizer, or enlarge the model's vocab_size"
        )


def no_documents(settings: DataSettings, rows: int, dropped: tuple[tuple[str, int], ...]) -> DataError:
    """Say why nothing is left to train on."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped) or "none"
    return DataError(
        f"nothing to train on in {', '.join(map(str, settings.paths))}: {rows} rows read, left out: {reasons}"
    )


def _check_vocabulary(cache: TokenCache, vocab_size: int) -> None:
    """Check a cache that was made for a model of a larger vocabulary (of the same element type)."""
    check_tokenizer(cache.header.tokenizer_vocabulary_size, vocab_size)
    if cache.header.max_id < vocab_size:
        return
    for what, values, starts in (
        ("token id", cache.tokens, cache.documents["start"]),
        ("label", cache.labels, cache.documents["label_start"]),
    ):
        owners = np.flatnonzero(starts >= 0)
        for first in range(0, len(values), SCAN_TOKENS):
            wrong = np.flatnonzero(values[first : first + SCAN_TOKENS] >= vocab_size)
            if len(wrong):
                at = first + int(wrong[0])
                document = int(owners[np.searchsorted(starts[owners], at, side="right") - 1])
                raise DataError(
                    f"{cache.place(document)}:{at - int(starts[document])}: {what} {values[at]} is outside the model's "
                    f"vocabulary [0, {vocab_size}); tokenise with the model's own tokenizer, or enlarge its vocabulary"
                )
