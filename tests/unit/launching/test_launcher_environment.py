"""Which rank a process is, told from the environment that its launcher made."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from smp_lite.comm.transports.launcher import (
    JOINED_VARIABLE,
    Alone,
    AtRendezvous,
    Launch,
    UnderMPI,
    note_joined,
    read_launch,
)
from smp_lite.errors import SMPError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}

AT_TORCHRUN = AtRendezvous(3, 4, "node1", 29500, local_rank=1, local_size=2, store_is_there=True)

# what, environment, expected
LAUNCHES: list[tuple[str, dict[str, str], Launch]] = [
    ("nothing", {"PATH": "/bin"}, Alone()),
    ("Open MPI", OPEN_MPI, UnderMPI(1, 4, "OMPI_COMM_WORLD_RANK")),
    ("MPICH", HYDRA, UnderMPI(2, 3, "PMI_RANK")),
    ("srun with PMIx", SLURM | {"PMIX_RANK": "5"}, UnderMPI(5, None, "PMIX_RANK")),
    ("srun with PMI", SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, UnderMPI(5, 8, "PMI_RANK")),
    ("srun without PMI", SLURM | ADDRESS, AtRendezvous(5, 8, "node1", 29500, local_rank=1)),
    ("one task of Slurm", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Alone()),
    ("a Slurm batch script", {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, Alone()),
    ("torchrun", TORCHRUN, AT_TORCHRUN),
    ("torchrun under srun", SLURM | {"PMIX_RANK": "0"} | TORCHRUN, AT_TORCHRUN),
    ("torchrun under mpirun", OPEN_MPI | TORCHRUN, AT_TORCHRUN),
    ("by hand", BY_HAND, AtRendezvous(0, 2, "10.0.0.1", 1234)),
    ("by hand in Slurm", SLURM | BY_HAND, AtRendezvous(0, 2, "10.0.0.1", 1234)),
    ("one by hand", {"RANK": "0", "WORLD_SIZE": "1"}, Alone()),
    (
        "mpirun, and the same ranks for torch.distributed",
        OPEN_MPI | ADDRESS | {"RANK": "1", "WORLD_SIZE": "4"},
        UnderMPI(1, 4, "OMPI_COMM_WORLD_RANK"),
    ),
]


@pytest.mark.parametrize(
    ("environment", "expected"), [case[1:] for case in LAUNCHES], ids=[case[0] for case in LAUNCHES]
)
def test_every_launcher_is_recognised(environment: dict[str, str], expected: Launch) -> None:
    assert read_launch(environment) == expected


# what, environment, words of the error
CONTRADICTIONS: list[tuple[str, dict[str, str], list[str]]] = [
    ("another size", OPEN_MPI | {"WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=4", "WORLD_SIZE=2"]),
    ("another rank", OPEN_MPI | {"RANK": "0"}, ["OMPI_COMM_WORLD_RANK=1", "RANK=0", "unset RANK"]),
    ("another rank than PMIx", {"PMIX_RANK": "2", "RANK": "0"}, ["PMIX_RANK=2", "RANK=0"]),
    ("no size", {"RANK": "0"}, ["RANK is set, but WORLD_SIZE is not"]),
    ("no rank", {"WORLD_SIZE": "2"}, ["WORLD_SIZE is set, but RANK is not"]),
    ("no MPI size", {"PMI_RANK": "0"}, ["PMI_RANK is set, but PMI_SIZE is not"]),
    ("no number", BY_HAND | {"RANK": "one"}, ["RANK='one'", "whole number of at least 0"]),
    ("an empty number", BY_HAND | {"WORLD_SIZE": ""}, ["WORLD_SIZE=''", "at least 1"]),
    ("a negative rank", BY_HAND | {"RANK": "-1"}, ["RANK='-1'"]),
    ("no MPI number", OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "0"}, ["OMPI_COMM_WORLD_SIZE='0'"]),
    ("a rank too high", BY_HAND | {"RANK": "2"}, ["RANK=2", "WORLD_SIZE=2", "count from 0"]),
    ("a port that is no number", BY_HAND | {"MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
    ("a local rank that is no number", BY_HAND | {"LOCAL_RANK": "a"}, ["LOCAL_RANK='a'"]),
    ("no address", {"RANK": "0", "WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "MASTER_ADDR is not set"]),
    ("no port", BY_HAND | {"MASTER_PORT": ""}, ["MASTER_PORT is not set"]),
    ("Slurm alone", SLURM, ["SLURM_NTASKS=8", "MASTER_ADDR is not set", "srun --mpi=pmix"]),
]


@pytest.mark.parametrize(
    ("environment", "words"), [case[1:] for case in CONTRADICTIONS], ids=[case[0] for case in CONTRADICTIONS]
)
def test_a_contradiction_names_the_variables(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        read_launch(environment)
    assert all(word in str(caught.value) for word in words)


def inherited(environment: dict[str, str]) -> dict[str, str]:
    """What a process finds that a rank with this environment has started."""
    noted = dict(environment)
    note_joined(noted, read_launch(environment))
    return noted | {JOINED_VARIABLE: json.dumps({**json.loads(noted[JOINED_VARIABLE]), "process": -1})}


PMIX = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-a-1@1"}
OTHER_MPI = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-a-2@1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize("rank", [PMIX, HYDRA, TORCHRUN, BY_HAND, SLURM | ADDRESS, SLURM | PMIX])
def test_what_a_rank_starts_is_not_that_rank(rank: dict[str, str]) -> None:
    noted = dict(rank)
    note_joined(noted, read_launch(rank))
    assert read_launch(noted) == read_launch(rank)  # the rank itself, once more
    with pytest.raises(SMPError, match=r"in a process that rank \d has started.*subprocess\.run\(") as caught:
        read_launch(inherited(rank))
    prefixes = eval(str(caught.value).partition("startswith(")[2].partition("))")[0] + ")")
    cleaned = {name: text for name, text in inherited(rank).items() if not name.startswith(prefixes)}
    assert read_launch(cleaned) == Alone()


def test_variables_that_a_rank_exports_for_its_collectives_do_not_make_its_children_ranks() -> None:
    exported = inherited(PMIX) | ADDRESS | {"RANK": "1", "WORLD_SIZE": "4"}
    with pytest.raises(SMPError, match="that rank 1 has started"):
        read_launch(exported)
    assert read_launch(inherited({"PATH": "/bin"})) == Alone()


# what, of the rank, of the launcher that it has started, expected
NESTED: list[tuple[str, dict[str, str], dict[str, str], Launch]] = [
    ("mpirun in mpirun", PMIX, OTHER_MPI, UnderMPI(1, 2, "OMPI_COMM_WORLD_RANK")),
    ("torchrun in mpirun", PMIX, TORCHRUN, AT_TORCHRUN),
    ("mpirun in torchrun", TORCHRUN, PMIX, UnderMPI(1, 4, "OMPI_COMM_WORLD_RANK")),
    ("torchrun in torchrun", TORCHRUN, TORCHRUN | {"TORCHELASTIC_ERROR_FILE": "new"}, AT_TORCHRUN),
    ("by hand in nothing", {}, BY_HAND, AtRendezvous(0, 2, "10.0.0.1", 1234)),
]


@pytest.mark.parametrize(
    ("rank", "launcher", "expected"), [case[1:] for case in NESTED], ids=[case[0] for case in NESTED]
)
def test_a_launcher_may_be_started_in_a_rank(
    rank: dict[str, str], launcher: dict[str, str], expected: Launch
) -> None:
    assert read_launch(inherited(rank) | launcher) == expected


@pytest.mark.parametrize("module", ["smp_lite.comm.transports.launcher", "smp_lite.stop_notice"])
def test_a_launcher_can_import_it_without_torch_and_mpi(module: str) -> None:
    program = f"import sys, {module}; print({{'torch', 'mpi4py'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("set()\n", "")
