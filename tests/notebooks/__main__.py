"""`python -m tests.notebooks`: runs the notebooks and writes their pictures, and nothing else, into them.

So they can be looked at without being run. Numbers and logs would differ from run to run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat

from tests.notebooks.executing import FOLDER, execute, pictures


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
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
        print(f"{path.name}: {pictures(notebook)} pictures")


if __name__ == "__main__":
    main()
