"""What mpirun says, in both versions: its name, and how a rank ended."""

from __future__ import annotations

import pytest

from smp_lite.entrypoints.mpi.mpirun import (
    Death,
    MpirunMessages,
    mpirun_version,
    own_memory_folder,
    own_session_folder,
)

RULE = "-" * 74


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n", (5, 0)),
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", (4, 1)),
        ("mpirun.real (OpenRTE) 4.1.4\nmpirun (Open MPI) 4.1.4\n", (4, 1)),
    ],
)
def test_the_version_of_open_mpi(text: str, version: tuple[int, int]) -> None:
    assert mpirun_version(text) == version


@pytest.mark.parametrize(
    "text",
    [
        "HYDRA build details:\n    Version:                                 4.1.2\n",
        "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005\n",
        "",
    ],
)
def test_another_mpi_is_told_by_what_it_says(text: str) -> None:
    first = text.partition("\n")[0]
    with pytest.raises(ValueError, match="not that of Open MPI") as caught:
        mpirun_version(text)
    assert repr(first) in str(caught.value)


ANNOUNCED = """\
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted."""

DEATHS = {
    "5: exit code": (
        """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-node-18462@1,3]
   Exit code:    7""",
        Death(3, exit_code=7),
    ),
    "4: exit code": (
        """\
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[11012,1],3]
  Exit code:    7""",
        Death(3, exit_code=7),
    ),
    "5: signal": (
        """\
prterun noticed that process rank 1 with PID 18474 on node algo-2 exited on
signal 9 (Killed).""",
        Death(1, signal_number=9),
    ),
    "4: signal": (
        "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 11 (Segmentation fault).",
        Death(1, signal_number=11),
    ),
    "5: abort": (
        """\
prterun has exited due to process rank 1 with PID 0 on node algo-2 calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).""",
        Death(1),
    ),
    "4: abort": (
        """\
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 5.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.""",
        Death(1),
    ),
}


@pytest.mark.parametrize(("account", "death"), DEATHS.values(), ids=DEATHS)
def test_an_account_of_a_death_is_read_and_not_shown(account: str, death: Death) -> None:
    messages = MpirunMessages()
    shown = [line for block in (ANNOUNCED, account) for line in feed(messages, block)]
    assert (shown, messages.death) == ([], death)


def test_any_other_block_is_shown_whole() -> None:
    messages = MpirunMessages()
    text = "There are not enough slots available in the system"
    assert feed(messages, text) == [RULE, text, RULE]
    assert messages.death is None


def feed(messages: MpirunMessages, block: str) -> list[str]:
    lines = [RULE, *block.splitlines(), RULE]
    return [shown for line in lines for shown in messages.feed(line)] + messages.close()


def test_each_mpirun_keeps_its_files_in_a_folder_of_its_own() -> None:
    variables = own_session_folder("/own", ("mpirun", "-n", "2", "true"), {"TMPDIR": "/large"})
    assert set(variables.values()) == {"/own"}
    assert not own_session_folder("/own", ("mpirun", "--prtemca", "prte_tmpdir_base", "/theirs"), {})
    assert not own_session_folder("/own", ("mpirun",), {"PRTE_MCA_prte_tmpdir_base": "/theirs"})
    assert not own_session_folder("/own", ("mpirun",), variables)


def test_a_place_for_shared_memory_that_the_user_has_chosen_stays() -> None:
    variables = own_memory_folder("/own", ("mpirun", "-n", "2", "true"), {})
    assert set(variables.values()) == {"/own"}
    assert not own_memory_folder("/own", ("mpirun", "--mca", "btl_sm_backing_directory", "/theirs"), {})
    assert not own_memory_folder("/own", ("mpirun",), {"OMPI_MCA_btl_vader_backing_directory": "/theirs"})
