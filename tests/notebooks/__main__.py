"""`python -m tests.notebooks`: runs the notebooks and writes their pictures, and nothing else, into them.

With names of notebooks after it, these alone. A picture that the README shows becomes a file beside them. So
they can be looked at without being run. Numbers and logs would differ from run to run.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import nbformat

from tests.notebooks.executing import FOLDER, execute, outputs, pictures

_LAST_PICTURES = {"04_systems.ipynb": "who_holds_what.png"}
"""Of a notebook, the file for its last picture."""


def main() -> None:
    for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory(prefix="notebooks-") as directory:
            notebook = execute(path.name, Path(directory), parameters={})
        for cell in notebook.cells:
            # When and for how long it ran.
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                shown = [output for output in cell.outputs if "image/png" in output.get("data", {})]
                cell.outputs = [
                    nbformat.v4.new_output("display_data", {"image/png": output.data["image/png"]})
                    for output in shown
                ]
                cell.execution_count = None
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        if path.name in _LAST_PICTURES:
            *_, last = outputs(notebook)
            (FOLDER / _LAST_PICTURES[path.name]).write_bytes(base64.b64decode(last.data["image/png"]))
        print(f"{path.name}: {pictures(notebook)} pictures")


if __name__ == "__main__":
    main()
