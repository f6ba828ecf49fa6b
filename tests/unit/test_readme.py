"""The README says what the code says."""

from __future__ import annotations

from pathlib import Path

from smp_lite.config import Config
from smp_lite.config.v1_parameters import PRIVATE_HINTS
from smp_lite.smp_v1.names import NAMES
from smp_lite.smp_v1.table import table, with_table

README = Path(__file__).resolve().parents[2] / "README.md"


def parameter_table() -> str:
    rows = [f"| `{n}` | {t} | {d} | {m} |".replace("\n", " ") for n, t, d, m in Config.describe()]
    return "\n".join(["| parameter | type | default | meaning |", "|---|---|---|---|", *rows])


def test_the_parameter_table_is_generated_from_config() -> None:
    text = README.read_text()
    begin = text.index("checked by a test -->\n") + len("checked by a test -->\n")
    assert text[begin : text.index("\n<!-- end of parameters -->")] == parameter_table()


def test_files_and_targets_that_it_names_exist() -> None:
    text = README.read_text()
    for name in (
        "notebooks/train_gpt.py",
        "smp_lite/record/step/recorder.py",
        "smp_lite/plan/step/segments.py",
    ):
        assert name in text
        assert (README.parent / name).is_file()


def test_the_table_of_names_is_generated_from_the_code() -> None:
    text = README.read_text()
    assert with_table(text) == text


def test_every_name_and_key_is_in_it() -> None:
    text = table()
    for path in NAMES:
        assert f"`{path}`" in text or f"`.{path.rpartition('.')[2]}`" in text
    for key in (*Config.model_fields, *PRIVATE_HINTS):
        assert f"`{key}`" in text
