"""The README says what the code says."""

from __future__ import annotations

from pathlib import Path

from smp_lite.config import Config

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
        "smp_lite/record/recorder.py",
        "smp_lite/plan/segments.py",
    ):
        assert name in text
        assert (README.parent / name).is_file()
