"""Where parameters come from: the environment wins, then a dictionary or a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smp_lite.config import (
    PARAMETERS_VARIABLE,
    Config,
    ConfigError,
    load_config,
    parse_parameters,
)


def test_the_environment_wins_whole_over_the_dictionary() -> None:
    environ = {PARAMETERS_VARIABLE: '{"partitions": 3, "ddp": true}'}

    config = load_config({"partitions": 2, "microbatches": 8}, environ)

    assert PARAMETERS_VARIABLE == "SM_HP_MP_PARAMETERS"
    assert config == Config(partitions=3, ddp=True)
    assert load_config(None, environ) == config


def test_the_dictionary_is_used_where_the_environment_has_none(tmp_path: Path) -> None:
    file = tmp_path / "parameters.json"
    file.write_text('{"partitions": 2}')

    assert load_config({"partitions": 2}, {}) == Config(partitions=2)
    assert load_config(str(file), {}) == Config(partitions=2)


@pytest.mark.parametrize("text", ["", "{partitions: 2}", "[2]", "2", "null", '"x"'])
def test_a_bad_variable_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment variable {PARAMETERS_VARIABLE} .*object"):
        load_config({"partitions": 2}, {PARAMETERS_VARIABLE: text})


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """JSON's reader would let the last one win without a word."""
    text = '{"partitions": 2, "ddp": true, "partitions": 4}'
    file = tmp_path / "parameters.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"{PARAMETERS_VARIABLE}: the key 'partitions' stands twice"):
        load_config(None, {PARAMETERS_VARIABLE: text})
    with pytest.raises(ConfigError, match=r"parameters\.json: the key 'partitions' stands twice"):
        load_config(str(file), {})


def test_neither_given_says_what_to_pass_and_how() -> None:
    with pytest.raises(ConfigError, match=r"smp\.init\({'partitions': 2}\).*SM_HP_MP_PARAMETERS"):
        load_config(None, {})


def test_parameters_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps({"partitions": 2, "ddp": True}))

    assert parse_parameters(str(file)) == {"partitions": 2, "ddp": True}


def test_parameters_are_copied() -> None:
    parameters = {"partitions": 2}

    assert parse_parameters(parameters) == parameters
    assert parse_parameters(parameters) is not parameters


@pytest.mark.parametrize("parameters", ["/no/such/file.json", ".", 3, None, ["partitions"]])
def test_no_such_file(parameters: Any) -> None:
    with pytest.raises(ConfigError) as error:
        parse_parameters(parameters)

    assert str(error.value).startswith(
        "Expected a string path to an existing modelparallel config, or a dictionary. "
        f"Received: {parameters!r}"
    )


@pytest.mark.parametrize("content", [b"{partitions: 2}", b"", b"[2]", b"\xff\xfe\x00"])
def test_a_file_that_does_not_parse(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "parameters.json"
    file.write_bytes(content)

    with pytest.raises(ConfigError) as error:
        parse_parameters(str(file))

    assert str(error.value).startswith(f"Cannot parse {file} as a json file.")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "parameters.json"
    file.symlink_to("/proc/self/mem")

    with pytest.raises(ConfigError, match=r"parameters.json cannot be read \(Input/output error\)"):
        parse_parameters(str(file))
