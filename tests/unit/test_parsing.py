"""Text from others is read or is a ValueError: also where Python's own parsers raise something else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.families.spec import read_config
from pipeline.prediction.hardware import load_hardware
from pipeline.recipe import RecipeError, load_recipe
from tasks import inspect
from tiers.errors import ShardError
from tiers.parsing import MAX_DEPTH, parse_json, parse_toml
from tiers.safetensors_header import read_header

DEEP = 100_000


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_what_is_nested_as_deeply_as_allowed_is_read_and_one_more_level_refused() -> None:
    assert json.dumps(parse_json(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    assert parse_toml(f"a = {nested(MAX_DEPTH - 1)}")
    for text in (nested(MAX_DEPTH + 1), nested(DEEP), nested(DEEP).encode(), '{"a":' * DEEP + "1" + "}" * DEEP):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_json(text)
    for text in (f"a = {nested(MAX_DEPTH)}", f"a = {nested(DEEP)}", f"{'a.' * 2000}a = 1"):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_toml(text)
    assert len(parse_json(json.dumps([[1]] * 1000))) == 1000


@pytest.mark.parametrize("read", [load_recipe, load_hardware, read_header, lambda path: read_config(path.parent)])
def test_a_file_nested_too_deeply_is_refused_by_name(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "config.json"
    text = nested(DEEP)
    path.write_text(f"a = {text}")
    if read is read_header:
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    elif read not in (load_recipe, load_hardware):
        path.write_text(text)
    with pytest.raises((ValueError, ShardError), match=f"{path}.*nested more than 100 deep"):
        read(path)


def test_an_override_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("")
    with pytest.raises(RecipeError, match=r"must have the form section\.key=value"):
        load_recipe(path, [f"{'a.' * 5000}a=1"])


@pytest.mark.parametrize("size", ["Infinity", "NaN", "1e999", "2.5", '"2"'])
def test_a_tensor_whose_size_is_no_whole_number_is_refused(tmp_path: Path, size: str) -> None:
    header = f'{{"a": {{"dtype": "F16", "shape": [{size}], "data_offsets": [0, 4]}}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ShardError, match="tensor a has a size or an offset that is no whole number"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[]", "holds no table of fields"),
        (b'{"model_type": "\xff"}', "cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (b'{"model_type"', "cannot be read: Expecting ':' delimiter"),
        (nested(DEEP).encode(), "cannot be read: it is nested more than 100 deep"),
    ],
)
def test_a_configuration_that_says_nothing_is_refused_by_name(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = b"{}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "config.json").write_bytes(content)
    assert inspect.main([str(tmp_path)]) == 2
    assert f"{tmp_path / 'config.json'} {told}" in capsys.readouterr().err
