"""The driver script of jobs that version 3 of the SDK starts (`estimator.model_trainer`).

Its container has set up variables and folder, and runs this file on every host, from
`<root>/input/data/sm_drivers/distributed_drivers/smp_lite/entrypoints`. The source is a folder there
(`<root>/input/data/code`), and what `SMPDistributed` says is in `<root>/input/data/sm_drivers`. This is
written into hyperparameters.json as version 2 of the SDK would have written it; from there on it is the
same job. The SDK's own MPI driver is not used: it starts as many ranks in all as each host should have.
"""

import json
import os
import sys
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[2]
SECRET_FILE = "job_secret"
"""Lies beside the package, and holds what the hosts of the job know each other by (`hosts.secret`)."""


def main():
    """Run the job of this container and return its exit code."""
    drivers = PACKAGES.parent
    root = drivers.parents[2]
    # The folder of this file stands first on the path, and its modules are not for import from there.
    sys.path[0] = str(PACKAGES)
    paths = [str(PACKAGES), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    from smp_lite.entrypoints import start

    start.end_on_sigterm()
    try:
        start.check_image()
        start.install(PACKAGES / "smp_lite" / "requirements.txt")
    except start.StartError as error:
        start.leave_failure(root, str(error))
        return 1
    add_hyperparameters(root, drivers)
    take_secret()
    from smp_lite.entrypoints.train import main as train

    return train(["--root", str(root)])


def add_hyperparameters(root, drivers):
    """Add to the job's hyperparameters what the launch reads there; a second time changes nothing."""
    file = root / "input" / "config" / "hyperparameters.json"
    source = json.loads((drivers / "sourcecode.json").read_text("utf-8"))
    distributed = json.loads((drivers / "distributed.json").read_text("utf-8"))
    added = {
        "sagemaker_program": source["entry_script"],
        "sagemaker_submit_directory": str(root / "input" / "data" / "code"),
        "sagemaker_job_name": os.environ.get("TRAINING_JOB_NAME"),
        "sagemaker_region": os.environ.get("AWS_REGION"),
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": distributed["process_count_per_node"],
        "sagemaker_mpi_custom_mpi_options": distributed["custom_mpi_options"],
        "mp_parameters": distributed["parameters"],
    }
    given = json.loads(file.read_text("utf-8"))
    given.update({name: json.dumps(value) for name, value in added.items() if value is not None})
    file.write_text(json.dumps(given), "utf-8")


def take_secret():
    """Give the secret that came with the driver to the job, unless the user has given it one."""
    file = PACKAGES / SECRET_FILE
    if file.exists():
        os.environ.setdefault("SMP_LITE_JOB_SECRET", file.read_text("utf-8"))


if __name__ == "__main__":
    sys.exit(main())
