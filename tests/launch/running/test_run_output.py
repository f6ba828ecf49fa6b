"""What a script run by `smp-lite run` sees, and how its output looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_lite.smp_v1.alias import ALIAS_FOLDER
from tests.launch.launching import HANG_S, launch, write


def test_every_line_carries_its_rank_and_the_two_streams_stay_apart(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "print(f'out {rank}')\nprint('two\\nlines')\nprint(f'err {rank}', file=sys.stderr)\n"
        "print('no line end', end='')\n",
    )
    result = launch(tmp_path, "--processes", "3", "script.py")
    assert result.returncode == 0
    expected = [
        f"[{rank}] {text}" for rank in range(3) for text in (f"out {rank}", "two", "lines", "no line end")
    ]
    assert sorted(result.stdout.splitlines()) == sorted(expected)
    assert sorted(result.stderr.splitlines()) == ["[0] err 0", "[1] err 1", "[2] err 2"]


@pytest.mark.ci
def test_ranks_form_one_mpi_world_with_the_parameters_and_one_thread_each(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "from mpi4py import MPI\n"
        "print(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank), MPI.COMM_WORLD.size)\n"
        "print(os.environ['SM_HP_MP_PARAMETERS'], os.environ['OMP_NUM_THREADS'])\n",
    )
    parameters = {"partitions": 3, "microbatches": 2}
    (tmp_path / "parameters.json").write_text(json.dumps(parameters))
    as_text = launch(tmp_path, "--processes", "3", "--parameters", json.dumps(parameters), "script.py")
    as_file = launch(tmp_path, "--processes", "3", "--parameters", "parameters.json", "script.py")
    expected = sorted(line for r in range(3) for line in (f"[{r}] 3 3", f"[{r}] {json.dumps(parameters)} 1"))
    assert sorted(as_text.stdout.splitlines()) == expected
    assert sorted(as_file.stdout.splitlines()) == expected


def test_mpirun_keeps_its_files_in_a_folder_of_this_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it another one may end at any moment and take the common folder away."""
    for name in [name for name in os.environ if name.endswith("tmpdir_base")]:
        monkeypatch.delenv(name)
    write(tmp_path, "script.py", "print(os.environ['PMIX_SERVER_TMPDIR'])\n")
    (line,) = launch(tmp_path, "--processes", "1", "script.py").stdout.splitlines()
    of_launch = Path(line.removeprefix("[0] ")).parent
    assert of_launch.name.startswith("smp-lite-")
    assert not of_launch.exists()


def test_the_users_thread_count_and_parameters_variable_are_left_alone(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "print(os.environ['SM_HP_MP_PARAMETERS'], os.environ['OMP_NUM_THREADS'])\n",
    )
    env = {"OMP_NUM_THREADS": "3", "SM_HP_MP_PARAMETERS": "mine"}
    result = launch(tmp_path, "--processes", "1", "script.py", env=env)
    assert result.stdout == "[0] mine 3\n"


# Except __annotations__, which Python makes for a script and newer ones make on demand.
SHOW_SURROUNDINGS = """
import json
print(json.dumps([
    __name__, __file__, sys.argv, sys.path, __package__, __spec__ and __spec__.name,
    type(__loader__).__name__,
    sorted(set(name for name in globals() if name[:2] == '__') - {'__annotations__'}),
    sys.modules['__main__'].__dict__ is globals(), sys.stdout.encoding,
]))
"""


@pytest.mark.parametrize("last", ["a b", ":"])  # mpirun cuts its command line at a colon
@pytest.mark.parametrize("target", [["inner/script.py"], ["-m", "inner.script"]])
def test_the_script_sees_what_plain_python_gives_it(tmp_path: Path, target: list[str], last: str) -> None:
    write(tmp_path, "inner/script.py", SHOW_SURROUNDINGS)
    words = [*target, "--processes", "9", "-m", last]
    launched = launch(tmp_path, "--processes", "1", *words)
    plain = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={"OMPI_COMM_WORLD_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    found = json.loads(launched.stdout.removeprefix("[0] "))
    assert found[3].pop() == ALIAS_FOLDER  # behind everything else
    assert found == json.loads(plain.stdout)


def test_standard_input_reaches_rank_0(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print(repr(sys.stdin.read()))\n")
    result = launch(tmp_path, "--processes", "2", "script.py", text_in="hello\n")
    assert sorted(result.stdout.splitlines()) == ["[0] 'hello\\n'", "[1] ''"]


def test_exit_handlers_still_find_the_scripts_globals(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import atexit\nword = 'bye'\natexit.register(lambda: print(word))\nsys.exit()\n",
    )
    result = launch(tmp_path, "--processes", "1", "script.py")
    assert (result.returncode, result.stdout) == (0, "[0] bye\n")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--processes", "2", "absent.py"], "script 'absent.py' is not a file"),
        (["--processes", "0", "there.py"], "processes must be at least 1, got 0"),
        (["--processes", "2", "--parameters", "{'a': 1}", "there.py"], "is not valid JSON"),
        (["--processes", "2", "--parameters", "absent.json", "there.py"], "absent.json"),
        (["--processes", "2", "--parameters", '{"partitoins": 2}', "there.py"], "partitoins"),
        (["--processes", "3", "--parameters", '{"partitions": 4}', "there.py"], "partitions"),
    ],
)
def test_a_users_mistake_is_one_message_before_anything_starts(
    tmp_path: Path, args: list[str], message: str
) -> None:
    write(tmp_path, "there.py", "print('started')\n")
    result = launch(tmp_path, *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("smp-lite run: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_launcher_imports_no_torch_and_no_mpi() -> None:
    program = (
        "import sys\nfrom smp_lite.cli import main\n"
        "import smp_lite.entrypoints.this_machine.launcher, smp_lite.entrypoints.rank_main\n"
        "main(['run', '--processes', '2', 'absent.py'])\n"
        "print(sorted({'torch', 'mpi4py', 'smp_lite.cli'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "['smp_lite.cli']\n"


def test_without_mpi_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom smp_lite.cli import main\n"
        "sys.executable = '/nowhere/bin/python'\n"
        "sys.exit(main(['run', '--processes', '2', 'there.py']))\n"
    )
    write(tmp_path, "there.py", "")
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert 'pip install "smp-lite[mpi]"' in result.stderr
