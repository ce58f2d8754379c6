"""Rows of every file format become the same documents; what cannot be read is named or counted, never padded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.messages import IGNORED
from tasks.data.settings import DataError, DataSettings
from tasks.data.sources import find_files
from tasks.data.token_cache import UNLABELLED, TokenCache
from tasks.data.tokenise import tokenise

ROWS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def read(tmp_path: Path, *paths: Path | str, vocab_size: int = 300, **settings: object) -> TokenCache:
    chosen = DataSettings(paths=tuple(Path(path) for path in paths), **settings)  # type: ignore[arg-type]
    return tokenise(chosen, vocab_size=vocab_size, cache_dir=tmp_path / "cache")


def documents(cache: TokenCache) -> list[list[int]]:
    return [cache.tokens[d["start"] : d["start"] + d["length"]].tolist() for d in cache.documents]


def write_parquet(path: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def write_stream(path: Path, table: pa.Table, *, stream: bool, chunk: int = 2) -> Path:
    open_writer = pa.ipc.new_stream if stream else pa.ipc.new_file
    with open_writer(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return path


LIST_TYPES = [
    pa.list_(pa.int32()),
    pa.list_(pa.uint8()),
    pa.list_(pa.int64()),
    pa.list_(pa.uint64()),
    pa.large_list(pa.int64()),
    pa.large_list(pa.uint16()),
]


@pytest.mark.parametrize("list_type", LIST_TYPES, ids=str)
@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_reads_every_list_type_of_integers(tmp_path: Path, list_type: pa.DataType, kind: str) -> None:
    ids = pa.array(ROWS, type=list_type)
    if kind == "parquet":
        path = write_parquet(tmp_path / "a.parquet", input_ids=ids)
    else:
        path = write_stream(tmp_path / "a.arrow", pa.table({"input_ids": ids}), stream=kind == "stream")
    cache = read(tmp_path, path)
    assert documents(cache) == ROWS
    assert cache.documents["row"].tolist() == [0, 1, 2]


def test_reads_fixed_size_lists_and_list_views(tmp_path: Path) -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], type=pa.list_(pa.int32(), 2))
    path = write_stream(tmp_path / "fixed.arrow", pa.table({"input_ids": fixed}), stream=True)
    cache = read(tmp_path, path, on_bad_row="skip")
    assert documents(cache) == [[1, 2], [3, 4]]
    assert cache.header.dropped == (("input_ids is null", 1),)
    view = pa.array(ROWS, type=pa.list_view(pa.int32()))
    path = write_stream(tmp_path / "view.arrow", pa.table({"input_ids": view}), stream=False)
    assert documents(read(tmp_path, path)) == ROWS


def test_files_of_different_list_types_are_one_stream(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", input_ids=pa.array(ROWS[:1], type=pa.list_(pa.int32())))
    write_parquet(tmp_path / "b.parquet", input_ids=pa.array(ROWS[1:], type=pa.large_list(pa.int64())))
    assert documents(read(tmp_path, tmp_path / "*.parquet")) == ROWS


def test_python_lists_and_numpy_columns_give_the_same_documents(tmp_path: Path) -> None:
    labels = [[IGNORED, 6, 7], [8, IGNORED], [IGNORED, IGNORED, 12, 13]]
    parquet = write_parquet(tmp_path / "a.parquet", input_ids=pa.array(ROWS), labels=pa.array(labels))
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"input_ids": i, "labels": t}) + "\n" for i, t in zip(ROWS, labels)))  # noqa: B905
    first, second = read(tmp_path, parquet), read(tmp_path, lines)
    assert documents(first) == documents(second) == ROWS
    assert first.labels.tolist() == second.labels.tolist() == [i for row in labels for i in row]
    assert first.documents["supervised"].tolist() == second.documents["supervised"].tolist() == [2, 0, 2]


def test_null_element_is_an_error_with_file_row_and_position(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array([[4], [1, None, 3], [None]], pa.list_(pa.int32())))
    with pytest.raises(DataError, match=r"a\.parquet:1:1: input_ids holds a null"):
        read(tmp_path, path)
    cache = read(tmp_path, path, on_bad_row="skip")
    assert documents(cache) == [[4]]
    assert cache.header.dropped == (("input_ids holds a null", 2),)


def test_null_and_empty_rows_do_not_shift_later_rows(tmp_path: Path) -> None:
    ids = pa.array([[1, 2], None, [], [3, 4, 5], None, [6]], type=pa.list_(pa.uint16()))
    path = write_parquet(tmp_path / "a.parquet", input_ids=ids)
    with pytest.raises(DataError, match=r"a\.parquet:1: input_ids is null"):
        read(tmp_path, path)
    cache = read(tmp_path, path, on_bad_row="skip")
    assert documents(cache) == [[1, 2], [3, 4, 5], [6]]
    assert cache.documents["row"].tolist() == [0, 3, 5]
    assert cache.header.dropped == (("input_ids is empty", 1), ("input_ids is null", 2))


def test_a_null_row_may_hide_values(tmp_path: Path) -> None:
    hidden = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()),
        pa.array([1, 2, 99, 99, 3], pa.int32()),
        mask=pa.array([False, True, False]),
    )
    path = write_stream(tmp_path / "a.arrow", pa.table({"input_ids": hidden}), stream=True, chunk=8)
    assert documents(read(tmp_path, path, on_bad_row="skip")) == [[1, 2], [3]]


def test_columns_of_null_type_are_as_if_absent(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", input_ids=pa.array([[1, 2]]), labels=pa.nulls(1))
    write_parquet(tmp_path / "b.parquet", input_ids=pa.array([[3, 4]]), labels=pa.array([[IGNORED, 4]]))
    cache = read(tmp_path, tmp_path / "*.parquet")
    assert cache.documents["label_start"].tolist() == [UNLABELLED, 0]
    assert cache.header.rows_without_labels == 1
    write_parquet(tmp_path / "c.parquet", input_ids=pa.nulls(2))
    with pytest.raises(DataError, match=r"c\.parquet:0: input_ids is null"):
        read(tmp_path, tmp_path / "c.parquet")


def test_null_labels_of_one_row_leave_it_unlabelled(tmp_path: Path) -> None:
    labels = pa.array([None, [IGNORED, 9], None], pa.list_(pa.int32()))
    cache = read(tmp_path, write_parquet(tmp_path / "a.parquet", input_ids=pa.array(ROWS), labels=labels))
    assert cache.documents["label_start"].tolist() == [UNLABELLED, 0, UNLABELLED]
    assert cache.documents["supervised"].tolist() == [2, 1, 3]


def test_many_record_batches_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("combining chunks overflows 32-bit offsets")

    rows = [[i % 200, i % 7] for i in range(3000)]
    table = pa.table({"input_ids": pa.chunked_array([pa.array(rows[i : i + 500]) for i in range(0, 3000, 500)])})
    path = write_stream(tmp_path / "a.arrow", table, stream=True, chunk=500)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    monkeypatch.setattr(pa, "concat_arrays", refuse)
    monkeypatch.setattr(pa, "concat_tables", refuse)
    assert documents(read(tmp_path, path)) == rows
    cache = read(tmp_path, tmp_path / "a.parquet")
    assert documents(cache) == rows
    assert cache.documents["row"].tolist() == list(range(3000))


def test_other_column_types_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array([[1.0, 2.0]]))
    with pytest.raises(DataError, match=r"input_ids.*list<.*double>.*must be a list of integers"):
        read(tmp_path, path)
    path = write_parquet(tmp_path / "b.parquet", ids=pa.array([[1, 2]]))
    with pytest.raises(DataError, match=r"neither a column 'input_ids'.*it has ids"):
        read(tmp_path, path)
    (tmp_path / "c.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"c\.parquet cannot be read as parquet"):
        read(tmp_path, tmp_path / "c.parquet")
    (tmp_path / "d.arrow").write_bytes(b"")
    with pytest.raises(DataError, match=r"d\.arrow cannot be read as arrow"):
        read(tmp_path, tmp_path / "d.arrow")


def test_a_column_whose_name_is_no_text_is_refused_by_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array([[1, 2]]))
    path.write_bytes(path.read_bytes().replace(b"input_ids", b"\xe5nput_ids"))
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as parquet: .*utf-8"):
        read(tmp_path, path)


def test_labels_of_another_length_are_a_bad_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array(ROWS), labels=pa.array([[5, 6, 7], [8], [1] * 4]))
    with pytest.raises(DataError, match=r"a\.parquet:1: labels and input_ids differ in length \(1 and 2\)"):
        read(tmp_path, path)
    assert documents(read(tmp_path, path, on_bad_row="skip")) == [ROWS[0], ROWS[2]]


def test_text_columns_and_jsonl_text_are_documents(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=pa.array(["ab", "é"]))
    assert documents(read(tmp_path, path)) == [[97, 98, 256], [0xC3, 0xA9, 256]]
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "ab"}\n\n{"text": "\\u00e9"}\n')
    assert documents(read(tmp_path, lines)) == [[97, 98, 256], [0xC3, 0xA9, 256]]
    assert documents(read(tmp_path, lines, append_eos=False, vocab_size=256)) == [[97, 98], [0xC3, 0xA9]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ""}', "empty text"),
        (b'{"text": null}', "no text"),
        (b'{"other": "x"}', "no text"),
        (b'{"text": 3}', "text is not a string"),
        (b'{"text": "\\ud800"}', "text is not valid Unicode"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"text": "x"', "not a line of JSON"),
        (b'{"text": "\xff"}', "not a line of JSON"),
        (b'{"input_ids": []}', "input_ids is empty"),
        (b'{"input_ids": "abc"}', "input_ids is not a list"),
        (b'{"input_ids": [1, null]}', "input_ids holds something other than integers"),
        (b'{"input_ids": [1, true]}', "input_ids holds something other than integers"),
        (b'{"input_ids": [1, 1e400]}', "input_ids holds something other than integers"),
        (b'{"input_ids": [99999999999999999999]}', "input_ids holds a number beyond 64 bits"),
        (b'{"input_ids": [1, 2], "labels": [1]}', "labels and input_ids differ in length"),
    ],
)
def test_bad_line_is_named_or_counted(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n' + line + b'\n{"text": "ko"}')
    with pytest.raises(DataError, match=rf"a\.jsonl:2.*: {reason}"):
        read(tmp_path, path)
    cache = read(tmp_path, path, on_bad_row="skip")
    assert documents(cache) == [[111, 107, 256], [107, 111, 256]]
    assert cache.header.rows == 3
    assert cache.header.dropped == ((reason, 1),)


def test_directories_are_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ["b/two.py", "a/one.py", "a/skip.pyc", ".git/hidden.py", "empty.py"]:
        file = tmp_path / "src" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if name == "empty.py" else name[0])
    settings = DataSettings(paths=(tmp_path / "src",), suffixes=("*.py",))
    names = [file.path.relative_to(tmp_path / "src").as_posix() for file in find_files(settings)]
    assert names == ["a/one.py", "b/two.py", "empty.py"]
    cache = read(tmp_path, tmp_path / "src", suffixes=("*.py",))
    assert documents(cache) == [[97, 256], [98, 256]]
    assert cache.header.dropped == (("empty file", 1),)


def test_paths_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.weird").write_text("x")
    with pytest.raises(DataError, match=r"nothere does not exist"):
        read(tmp_path, tmp_path / "nothere")
    with pytest.raises(DataError, match=r"\*\.txt matches no file"):
        read(tmp_path, tmp_path / "*.txt")
    with pytest.raises(DataError, match=r"holds no file that matches .*it holds \.weird.*data\.suffixes"):
        read(tmp_path, tmp_path)
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"a \.gz file is neither"):
        read(tmp_path, tmp_path / "a.jsonl.gz")
    with pytest.raises(DataError, match="on_bad_row is 'ignore'; it must be one of error, skip"):
        read(tmp_path, tmp_path / "a.weird", on_bad_row="ignore")


def test_raw_bytes_and_large_files_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.data.text_rows.TEXT_PIECE_BYTES", 64)
    monkeypatch.setattr("tasks.data.tokenise.BATCH_TEXT_BYTES", 100)
    content = bytes(np.random.default_rng(0).integers(0, 256, 1500).astype(np.uint8)) + b"\n\n  x\ny" * 40
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"tail\n")
    assert documents(read(tmp_path, tmp_path / "*.txt")) == [[*content, 256], [*b"tail\n", 256]]


@pytest.mark.parametrize("bad", [64_000, 64_001, -1])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_id_outside_the_vocabulary_is_named_before_any_gpu_sees_it(tmp_path: Path, bad: int, kind: str) -> None:
    rows = [[1, 2], [3, 63_999, bad]]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, input_ids=pa.array(rows))
    else:
        path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    row = 1 if kind == "parquet" else 2
    with pytest.raises(DataError, match=rf"a\.{kind}:{row}:2: token id {bad} is outside .*\[0, 64000\)"):
        read(tmp_path, path, vocab_size=64_000, on_bad_row="skip")


def test_huge_unsigned_id_does_not_wrap(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array([[1, 2**64 - 1]], pa.list_(pa.uint64())))
    with pytest.raises(DataError, match=r"a\.parquet:0:1: token id 9223372036854775807 is outside"):
        read(tmp_path, path)


def test_only_minus_100_masks_a_label(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array([[1, 2, 3]]), labels=pa.array([[IGNORED, -1, 3]]))
    with pytest.raises(DataError, match=r"a\.parquet:0:1: label -1 is neither -100"):
        read(tmp_path, path)
    path = write_parquet(tmp_path / "b.parquet", input_ids=pa.array([[1, 2, 3]]), labels=pa.array([[0, 0, 3]]))
    assert read(tmp_path, path).documents["supervised"].tolist() == [2]  # 0 is a token like any other


def test_shifted_labels_are_refused(tmp_path: Path) -> None:
    rows = [[(7 * i + j * j) % 250 for j in range(20)] for i in range(5)]
    shifted = [[*row[1:], IGNORED] for row in rows]
    path = write_parquet(tmp_path / "a.parquet", input_ids=pa.array(rows), labels=pa.array(shifted))
    with pytest.raises(DataError, match=r"a\.parquet:0: labels are already shifted"):
        read(tmp_path, path)
    path = write_parquet(tmp_path / "b.parquet", input_ids=pa.array(rows), labels=pa.array(rows))
    assert read(tmp_path, path).documents["supervised"].tolist() == [19] * 5


@pytest.mark.parametrize("content", ["", '{"text": ""}\n{"text": null}\n'])
def test_nothing_left_says_what_was_read_and_left_out(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    wanted = "2 rows read, left out: 1 empty text, 1 no text" if content else "0 rows read, left out: none"
    with pytest.raises(DataError, match=rf"nothing to train on in .*a\.jsonl: {wanted}"):
        read(tmp_path, path, on_bad_row="skip")
