"""What a finished local job has left, read from the archives that the service would put into S3."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["read_output"]


def read_output(model_data: str, name: str) -> Any:
    """The JSON file ``name`` of what the script wrote to its output folder.

    Args:
        model_data: of the estimator: the ``file://`` address of model.tar.gz.
        name: relative to SM_OUTPUT_DATA_DIR.
    """
    path = Path(unquote(urlsplit(model_data).path)).with_name("output.tar.gz")
    with tarfile.open(path) as archive:
        file = archive.extractfile(name)
        assert file is not None, f"{name} is a folder"
        return json.load(file)
