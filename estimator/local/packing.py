"""Source code is packed without the folder of local jobs, which by default lies in the working directory.

Otherwise each job would carry all jobs before it, and their data, for the SDK's tar follows the links to
it. The SDK packs what it finds in `source_dir` and knows no exceptions. So it is given a folder of links
to everything there but the jobs, which costs nothing, and packs the same archive from it.

Private names of the SDK that this relies on: `_stage_user_code_in_s3`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sagemaker.estimator import EstimatorBase

__all__ = ["leave_jobs_out"]


def leave_jobs_out(jobs_of: Callable[[Any], Path | None]) -> None:
    """From now on, pack the source of all estimators without the jobs of their session.

    Args:
        jobs_of: the folder of a session's jobs; None where it has none.
    """
    original = EstimatorBase._stage_user_code_in_s3

    def stage(estimator: EstimatorBase) -> Any:
        jobs = jobs_of(estimator.sagemaker_session)
        if jobs is None or not jobs.is_dir():
            return original(estimator)
        given = estimator.source_dir, estimator.dependencies
        with tempfile.TemporaryDirectory() as temporary:
            scratch = Path(temporary)
            try:
                if estimator.source_dir is not None:
                    estimator.source_dir = _without(
                        jobs, "source_dir", estimator.source_dir, scratch / "source"
                    )
                estimator.dependencies = [
                    _dependency_without(jobs, name, scratch / str(index))
                    for index, name in enumerate(estimator.dependencies or ())
                ]
                return original(estimator)
            finally:
                estimator.source_dir, estimator.dependencies = given

    EstimatorBase._stage_user_code_in_s3 = stage


def _dependency_without(jobs: Path, folder: Any, scratch: Path) -> Any:
    """As `_without`, under the same name: the SDK packs a dependency under the last part of its path, and the
    contents of "." and of "folder/" without a name."""
    name = os.path.basename(folder) if isinstance(folder, (str, os.PathLike)) else ""
    ending = {"": "/", ".": "/."}.get(str(name), "")
    view_name = "contents" if ending or name == ".." else str(name)
    view = _without(jobs, "dependencies", folder, scratch / view_name)
    if view is not folder and name == "..":
        raise ValueError(
            f"dependencies={folder!r} holds the folder of the session's jobs: give its own name, not '..'"
        )
    return view if view is folder else view + ending


def _without(jobs: Path, argument: str, folder: Any, view: Path) -> Any:
    """`folder`, or where the jobs are in it, a new folder `view` of links to the rest.

    Raises:
        ValueError: the jobs are not in a folder of their own.
    """
    if not isinstance(folder, (str, os.PathLike)) or not os.path.isdir(folder):
        return folder
    source, jobs = Path(os.path.abspath(folder)), Path(os.path.abspath(jobs))
    if not jobs.is_relative_to(source):  # as they are named; a link may lead from one to the other
        source, jobs = source.resolve(), jobs.resolve()
    if source == jobs:
        raise ValueError(
            f"{argument}={str(folder)!r} is also the folder of LocalMPISession(directory=...): all earlier "
            "jobs would be sent with this one. Give the session a folder of its own"
        )
    if not jobs.is_relative_to(source):
        return folder
    _link_all_but(jobs, source, view)
    return str(view)


def _link_all_but(left_out: Path, source: Path, view: Path) -> None:
    view.mkdir(parents=True)
    for entry in source.iterdir():
        if left_out == entry:
            continue
        if left_out.is_relative_to(entry):
            _link_all_but(left_out, entry, view / entry.name)
        else:
            (view / entry.name).symlink_to(entry)
