"""A Hugging Face tokenizer from a directory gives its own ids; what it lacks is an error before training."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tasks.data.dataset import open_dataset
from tasks.data.fingerprint import fingerprint
from tasks.data.settings import DataError, DataSettings
from tasks.data.sources import find_files
from tasks.data.tokenise import tokenise
from tasks.data.tokenizers import DirectoryTokenizer

CORPUS = ["the quick brown fox\njumps over the lazy dog\n", "déjà vu, the fox 123\n"] * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE that begins every text with <bos>, as Llama's does."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet)
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>").save_pretrained(path)
    return path


def settings_for(path: Path, directory: Path, **options: object) -> DataSettings:
    return DataSettings(paths=(path,), tokenizer=str(directory), **options)  # type: ignore[arg-type]


def test_document_is_begin_text_end(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(CORPUS[1])
    own = DirectoryTokenizer(directory, append_eos=True)
    (ids,) = own.encode([CORPUS[1].encode()])
    assert (own.begin, own.end) == ((0,), (1,))
    cache = tokenise(settings_for(path, directory), vocab_size=300, cache_dir=tmp_path / "cache")
    assert cache.tokens.tolist() == [0, *ids.tolist(), 1]
    assert own.encode([b"", b"a"])[0].tolist() == []


def test_pieces_of_a_large_text_give_the_ids_of_the_whole(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(CORPUS) + "\n\n    indented\n" + "".join(CORPUS)
    (tmp_path / "a.txt").write_text(text)
    (ids,) = DirectoryTokenizer(directory, append_eos=False).encode([text.encode()])
    monkeypatch.setattr("tasks.data.text_rows.TEXT_PIECE_BYTES", 48)
    cache = tokenise(settings_for(tmp_path / "a.txt", directory), vocab_size=300, cache_dir=tmp_path / "cache")
    np.testing.assert_array_equal(cache.tokens, [0, *ids, 1])


def test_text_that_is_not_utf8_is_a_bad_row(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode() * 10 + b"\xff\n")
    (tmp_path / "b.txt").write_text("the fox")
    with pytest.raises(DataError, match=r"a\.txt:1: not UTF-8 \(byte 20 of the file\)"):
        tokenise(settings_for(tmp_path / "*.txt", directory), vocab_size=300, cache_dir=tmp_path / "cache")
    skipping = settings_for(tmp_path / "*.txt", directory, on_bad_row="skip")
    cache = tokenise(skipping, vocab_size=300, cache_dir=tmp_path / "cache")
    assert cache.header.num_documents == 1
    assert cache.header.dropped == (("not UTF-8", 1),)


def test_empty_text_row_is_named(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the fox"}\n{"text": ""}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: empty text"):
        tokenise(settings_for(path, directory), vocab_size=300, cache_dir=tmp_path / "cache")


def test_larger_tokenizer_is_refused_and_a_smaller_one_fits(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the fox")
    size = DirectoryTokenizer(directory, append_eos=True).vocabulary_size

    def open_with(vocab_size: int) -> int:
        dataset = open_dataset(
            settings_for(path, directory), sequence_length=8, seed=0, vocab_size=vocab_size, cache_dir=tmp_path / "c"
        )
        return dataset.report.documents

    with pytest.raises(DataError, match=f"the tokenizer has {size} tokens, the model's vocabulary {size - 1}"):
        open_with(size - 1)
    assert open_with(size) == open_with(size + 100) == 1


def test_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    with pytest.raises(DataError, match=r"data\.tokenizer gpt2 is no directory"):
        tokenise(settings_for(path, Path("gpt2")), vocab_size=300, cache_dir=tmp_path / "cache")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"the tokenizer in .*empty cannot be loaded"):
        tokenise(settings_for(path, empty), vocab_size=300, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("tokenizer.json", True),
        ("spiece.model", True),
        ("sentencepiece.bpe.model", True),
        ("tekken.json", True),
        ("qwen.tiktoken", True),
        ("config.json", True),
        ("model-00001-of-00002.safetensors", False),
        ("pytorch_model.bin", False),
        (".gitattributes", False),
    ],
)
def test_a_cache_is_of_every_file_that_a_tokenizer_may_be_made_of(tmp_path: Path, name: str, counts: bool) -> None:
    (tmp_path / "a.txt").write_text("the fox")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "inner").mkdir()
    settings = settings_for(tmp_path / "a.txt", tmp_path / "tokenizer")
    files = find_files(settings)
    before = fingerprint(settings, files, "<u2")
    names = set()
    for content in ("a" * 3_000_000, "a" * 1_000_000 + "b" + "a" * 1_999_999):
        (tmp_path / "tokenizer" / name).write_text(content)
        os.utime(tmp_path / "tokenizer" / name, (1, 1))
        names.add(fingerprint(settings, files, "<u2"))
    assert len(names) == (2 if counts else 1)
    assert (before in names) is not counts
