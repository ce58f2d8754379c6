"""From files to sequences: targets, positions, held-out documents, the report and the cache."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.messages import IGNORED, Batch
from tasks.data.cache_writer import CacheWriter
from tasks.data.dataset import PackedDataset, open_dataset
from tasks.data.loader import eval_batches
from tasks.data.progress import TokenisationProgress
from tasks.data.rows import TokenBlock
from tasks.data.settings import DataError, DataSettings
from tasks.data.token_cache import DOCUMENT, open_cache
from tasks.data.tokenise import tokenise


def write_rows(path: Path, rows: list[list[int]], labels: list[list[int] | None] | None = None) -> Path:
    columns = {"input_ids": pa.array(rows)} | ({"labels": pa.array(labels)} if labels else {})
    pq.write_table(pa.table(columns), path)
    return path


def open_rows(
    tmp_path: Path,
    rows: list[list[int]],
    labels: list[list[int] | None] | None = None,
    length: int = 8,
    **options: object,
) -> PackedDataset:
    path = write_rows(tmp_path / "rows.parquet", rows, labels)
    return open_path(tmp_path, path, length=length, **options)


def open_path(tmp_path: Path, path: Path, *, length: int = 8, seed: int = 0, **options: object) -> PackedDataset:
    settings = DataSettings(paths=(path,), **options)  # type: ignore[arg-type]
    return open_dataset(settings, sequence_length=length, seed=seed, vocab_size=1000, cache_dir=tmp_path / "cache")


def whole(dataset: PackedDataset) -> Batch:
    (batch,) = eval_batches(dataset, dataset.num_sequences, 1)
    return batch


def document(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_targets_are_the_next_tokens_of_the_same_document(tmp_path: Path) -> None:
    dataset = open_rows(tmp_path, [[10, 11, 12], [20, 21], [30]], shuffle=False)
    batch = whole(dataset)
    assert batch.input_ids.tolist() == [[[10, 11, 12, 20, 21, 30, 0, 0]]]
    assert batch.targets.tolist() == [[[11, 12, IGNORED, 21, IGNORED, IGNORED, IGNORED, IGNORED]]]
    assert batch.position_ids.tolist() == [[[0, 1, 2, 0, 1, 0, 0, 1]]]
    assert (batch.tokens, batch.supervised_tokens, batch.single_document) == (6, 3, False)
    assert batch.input_ids.dtype == batch.targets.dtype == batch.position_ids.dtype == np.int32


def test_changing_one_document_leaves_the_targets_of_its_neighbour(tmp_path: Path) -> None:
    for last in (12, 99):
        batch = whole(open_rows(tmp_path, [[10, 11, last], [20, 21, 22]], shuffle=False))
        assert batch.targets[0, 0, 3:6].tolist() == [21, 22, IGNORED]
        assert last not in batch.targets[0, 0, 2:]


def test_labels_are_unshifted_and_only_minus_100_is_ignored(tmp_path: Path) -> None:
    rows = [[10, 11, 12, 13], [20, 21, 22]]
    batch = whole(open_rows(tmp_path, rows, [[IGNORED, IGNORED, 12, 0], None], shuffle=False))
    assert batch.targets.tolist() == [[[IGNORED, 12, 0, IGNORED, 21, 22, IGNORED, IGNORED]]]
    assert batch.supervised_tokens == 4
    # labels == input_ids is plain language modelling: what memorises.
    same, none = (whole(open_rows(tmp_path, rows, labels)) for labels in (rows, None))
    np.testing.assert_array_equal(same.targets, none.targets)


@pytest.mark.parametrize("length", [60, 61, 120, 121])
@pytest.mark.parametrize("labelled", [False, True])
def test_split_keeps_every_token_and_every_target(tmp_path: Path, length: int, labelled: bool) -> None:
    rows = [document(100, length)]
    dataset = open_rows(tmp_path, rows, rows if labelled else None, length=60, shuffle=False)
    batch = whole(dataset)
    report = dataset.report
    assert report.tokens == batch.tokens == length
    assert report.supervised_tokens == batch.supervised_tokens == length - 1
    assert report.tokens + report.padding_tokens == 60 * report.sequences
    assert report.documents_split == (length > 60)
    supervised = batch.targets != IGNORED
    assert (batch.targets[supervised] == batch.input_ids[supervised] + 1).all()
    assert sorted(batch.targets[supervised].tolist()) == rows[0][1:]


@pytest.mark.parametrize("length", [60, 61, 120, 121])
@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_truncate_and_drop_account_for_every_token(tmp_path: Path, length: int, policy: str) -> None:
    rows = [document(100, length), document(500, 9)]
    dataset = open_rows(tmp_path, rows, length=60, long_documents=policy)
    batch, report = whole(dataset), dataset.report
    long_tokens = {"truncate": min(length, 60), "drop": length if length <= 60 else 0}[policy]
    assert report.tokens == batch.tokens == long_tokens + 9
    assert report.tokens + report.dropped_tokens == length + 9
    assert report.supervised_tokens == batch.supervised_tokens == max(long_tokens - 1, 0) + 8
    left_out = (("longer than a sequence", 1),) if policy == "drop" and length > 60 else ()
    assert report.documents_left_out == left_out


def test_one_document_that_fills_its_sequence_is_marked(tmp_path: Path) -> None:
    assert whole(open_rows(tmp_path, [document(1, 16), document(50, 8)])).single_document
    assert not whole(open_rows(tmp_path, [document(1, 16), document(50, 7)])).single_document
    assert not whole(open_rows(tmp_path, [document(1, 16), document(50, 4), document(80, 4)])).single_document


def test_answer_lost_to_truncation_is_reported(tmp_path: Path) -> None:
    prompt = [IGNORED] * 300 + document(300, 10)
    rows, labels = [document(0, 310), document(5, 20)], [prompt, document(5, 20)]
    options = {"length": 256, "long_documents": "truncate"}
    with pytest.raises(DataError, match=r"rows\.parquet:0: no supervised token after truncation to 256 of 310"):
        open_rows(tmp_path, rows, labels, **options)  # type: ignore[arg-type]
    report = open_rows(tmp_path, rows, labels, on_bad_row="skip", **options).report  # type: ignore[arg-type]
    assert report.documents_left_out == (("no supervised token after truncation", 1),)
    assert (report.tokens, report.dropped_tokens) == (20, 310)
    assert "documents left out: 1 no supervised token after truncation" in str(report)


def test_documents_without_any_target_are_kept_and_reported(tmp_path: Path) -> None:
    dataset = open_rows(tmp_path, [document(1, 8)], [[IGNORED] * 8])
    assert whole(dataset).supervised_tokens == 0
    assert dataset.report.documents_without_target == 1
    assert "have no target" in str(dataset.report)


def test_report_tells_rows_documents_sequences_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n' * 300 + '{"text": ""}\n')
    report = open_path(tmp_path, path, length=16, on_bad_row="skip").report
    assert str(report) == (
        "1 file, 301 rows -> 300 documents -> 75 sequences of 16 -> 1,200 tokens, 900 of them targets; "
        "0 padding (0.0%)\n  rows left out: 1 empty text"
    )


def test_tokenizer_larger_than_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    settings = DataSettings(paths=(path,))

    def open_with(vocab_size: int) -> PackedDataset:
        return open_dataset(settings, sequence_length=8, seed=0, vocab_size=vocab_size, cache_dir=tmp_path / "cache")

    with pytest.raises(DataError, match="the tokenizer has 257 tokens, the model's vocabulary 256"):
        open_with(256)
    assert open_with(257).report.tokens == 6
    assert open_with(320).report.tokens == 6  # embeddings are often padded
    with pytest.raises(DataError, match="the tokenizer has 257 tokens, the model's vocabulary 256"):
        open_with(256)  # from the cache, too


def test_cached_ids_are_checked_against_a_smaller_model(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", [[1, 2], [3, 900, 4]])
    settings = DataSettings(paths=(path,))
    tokenise(settings, vocab_size=1000, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"a\.parquet:1:1: token id 900 is outside"):
        tokenise(settings, vocab_size=900, cache_dir=tmp_path)
    path = write_rows(tmp_path / "b.parquet", [[1, 2], [3, 4]], [None, [IGNORED, 950]])
    settings = DataSettings(paths=(path,))
    tokenise(settings, vocab_size=1000, cache_dir=tmp_path)
    with pytest.raises(DataError, match=r"b\.parquet:1:1: label 950 is outside"):
        tokenise(settings, vocab_size=900, cache_dir=tmp_path)


def test_storage_holds_the_largest_id(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", [[1, 70_000, 65_535]])
    cache = tokenise(DataSettings(paths=(path,)), vocab_size=100_000, cache_dir=tmp_path)
    assert cache.tokens.dtype.itemsize == 4
    assert cache.tokens.tolist() == [1, 70_000, 65_535]
    path = write_rows(tmp_path / "b.parquet", [[1, 65_535]])
    cache = tokenise(DataSettings(paths=(path,)), vocab_size=65_536, cache_dir=tmp_path)
    assert cache.tokens.dtype.itemsize == 2
    assert cache.tokens.tolist() == [1, 65_535]


def test_writer_refuses_ids_that_its_elements_cannot_hold(tmp_path: Path) -> None:
    block = TokenBlock(np.array([0]), np.array([0]), np.array([0, 1]), np.array([70_000]), np.array([True]))
    with CacheWriter(tmp_path / "c", np.dtype("<u2")) as writer, pytest.raises(DataError, match="do not fit uint16"):
        writer.add(block)


def test_cache_is_reused_until_the_data_change(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    first = open_path(tmp_path, path)
    token_file = next((tmp_path / "cache").glob("*/tokens.bin"))
    written_ns = token_file.stat().st_mtime_ns
    again = open_path(tmp_path, path, length=16)  # packing is no part of the cache
    assert token_file.stat().st_mtime_ns == written_ns
    assert first.fingerprint == open_path(tmp_path, path).fingerprint != again.fingerprint
    path.write_text("jello")  # same size, perhaps the same time
    assert whole(open_path(tmp_path, path)).input_ids[0, 0, 0] == ord("j")


def test_changed_labels_of_the_same_number_change_the_fingerprint(tmp_path: Path) -> None:
    """A resume would go on in other targets. Labels that are not read do not count."""
    rows = [[10, 11, 12, 13], [20, 21, 22]]
    answers: list[list[list[int] | None]] = [[[IGNORED, IGNORED, 12, 13], None], [[IGNORED, 11, IGNORED, 13], None]]
    first, other = (open_rows(tmp_path, rows, labels) for labels in answers)
    assert first.report.supervised_tokens == other.report.supervised_tokens
    assert first.fingerprint != other.fingerprint
    assert first.fingerprint_without_labels == other.fingerprint_without_labels
    assert open_rows(tmp_path, rows, answers[0]).fingerprint == first.fingerprint
    unread, unlabelled = (open_rows(tmp_path, rows, labels, labels_column=None) for labels in (answers[0], None))
    assert unread.fingerprint == unlabelled.fingerprint == unlabelled.fingerprint_without_labels


def test_a_dataset_knows_whether_text_was_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert open_path(tmp_path, tmp_path / "a.txt").bytes_tokenised
    assert not open_rows(tmp_path, [[10, 11, 12, 13]]).bytes_tokenised


def test_a_cache_without_a_checksum_of_its_labels_is_written_anew(tmp_path: Path) -> None:
    rows = [[10, 11, 12, 13]]
    first = open_rows(tmp_path, rows, [[IGNORED, 11, 12, 13]])
    (header,) = (tmp_path / "cache").glob("*/header.json")
    fields = json.loads(header.read_text())
    del fields["labels_checksum"]
    header.write_text(json.dumps(fields | {"format_version": 1}))
    assert open_rows(tmp_path, rows, [[IGNORED, 11, 12, 13]]).fingerprint == first.fingerprint
    assert json.loads(header.read_text())["labels_checksum"]


def test_damaged_and_abandoned_caches_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello")
    open_path(tmp_path, path)
    (directory,) = (tmp_path / "cache").iterdir()
    with (directory / "tokens.bin").open("r+b") as stream:
        stream.truncate(3)
    assert open_cache(directory) is None
    abandoned = directory.with_name(directory.name + ".partial-999999999")
    abandoned.mkdir()
    assert open_path(tmp_path, path).report.tokens == 6
    assert not abandoned.exists()


def test_a_cache_whose_header_is_damaged_is_made_anew(tmp_path: Path) -> None:
    rows, labels = [[10, 11, 12, 13], [20, 21]], [[IGNORED, 11, 12, 13], None]
    first = open_rows(tmp_path, rows, labels)
    (header,) = (tmp_path / "cache").glob("*/header.json")
    written = header.read_text()
    fields = json.loads(written)
    damaged = ["[]", "null", "1", '"x"', "", "{}", "{", "[" * 1000]
    for name in fields:
        damaged.append(json.dumps({key: value for key, value in fields.items() if key != name}))
        damaged += [json.dumps(fields | {name: value}) for value in (None, "x", [1], {}, -1.5, [["x", "y"]])]
    for text in damaged:
        header.write_text(text)
        assert open_cache(header.parent) is None, text
    header.write_text("[]")
    assert open_rows(tmp_path, rows, labels).fingerprint == first.fingerprint
    assert header.read_text() == written


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("start", -1),
        ("start", 3),
        ("length", 0),
        ("length", 2**62),
        ("label_start", 1),
        ("label_start", -2),
        ("file", 1),
        ("file", -1),
    ],
)
def test_a_cache_with_a_document_outside_of_it_is_made_anew(tmp_path: Path, column: str, value: int) -> None:
    rows, labels = [[10, 11, 12, 13]], [[IGNORED, 11, 12, 13]]
    first = open_rows(tmp_path, rows, labels)
    (path,) = (tmp_path / "cache").glob("*/documents.bin")
    records = np.fromfile(path, DOCUMENT)
    records[column] = value
    records.tofile(path)
    assert open_cache(path.parent) is None
    assert open_rows(tmp_path, rows, labels).fingerprint == first.fingerprint


def test_nobody_else_reads_a_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    open_path(tmp_path, tmp_path / "a.txt")
    cache = tmp_path / "cache"
    for path in (cache, *cache.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_failed_tokenisation_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n{"text": ""}\n')
    with pytest.raises(DataError, match="empty text"):
        open_path(tmp_path, path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    rows = [document(i, 4) for i in range(100)] + [document(7, 4)] * 20
    dataset = open_rows(tmp_path, rows, eval_fraction=0.2, seed=4)
    assert dataset.held_out is not None
    first_tokens = []
    for side in (dataset, dataset.held_out):
        batch = whole(side)
        first_tokens.append(batch.input_ids[(batch.position_ids == 0) & (batch.targets != IGNORED)].tolist())
    assert set(first_tokens[0]).isdisjoint(first_tokens[1])
    assert sorted(first_tokens[0] + first_tokens[1]) == sorted(row[0] for row in rows)
    assert 24 <= len(first_tokens[1]) <= 44  # equal documents stay together
    assert dataset.held_out.report.documents + dataset.report.documents == 120


def test_end_of_a_single_document_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(100)))
    dataset = open_path(tmp_path, path, eval_fraction=0.1, append_eos=False)
    assert dataset.held_out is not None
    assert dataset.report.tokens == 90
    assert sorted(set(whole(dataset.held_out).targets.ravel().tolist())) == [IGNORED, *range(91, 100)]


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds out all 2 documents"):
        open_rows(tmp_path, [[1, 2, 3]] * 2, eval_fraction=0.5)
    with pytest.raises(DataError, match="cannot hold out a part of the only document"):
        open_rows(tmp_path, [[1, 2, 3]], eval_fraction=0.5)


def test_all_documents_dropped_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 rows read, left out: 2 longer than a sequence"):
        open_rows(tmp_path, [document(1, 9)] * 2, long_documents="drop")


def test_progress_estimates_the_time_left() -> None:
    now_s = iter([0.0, 1.0, 10.0, 11.0])
    lines: list[str] = []
    progress = TokenisationProgress(4_000_000_000, lines.append, clock=lambda: next(now_s))
    for _ in range(3):
        progress.advance(5e8)
        progress.wrote(1000)
    assert lines == ["tokenising: 25% of 3.73 GiB, 2,000 tokens, 200 tokens/s, about 30.0 s left"]


def test_errors_and_reports_travel_between_processes(tmp_path: Path) -> None:
    report = open_rows(tmp_path, [[1, 2, 3]]).report
    assert pickle.loads(pickle.dumps(report)) == report
    assert str(pickle.loads(pickle.dumps(DataError("a.parquet:1: bad")))) == "a.parquet:1: bad"
    assert dataclasses.is_dataclass(report)
