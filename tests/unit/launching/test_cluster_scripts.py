"""What `smp-lite launch` prints: whole texts, the operator's schema, and every refusal."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from smp_lite.cli import main
from smp_lite.entrypoints.clusters.cluster_job import ClusterJob, job_name
from smp_lite.entrypoints.clusters.kubernetes_manifest import kubernetes_manifest
from smp_lite.entrypoints.clusters.slurm_script import slurm_script

DATA = Path(__file__).parent / "data"
HOSTILE = [
    "1e-3",
    "y",
    "a b",
    "$(HOME)",
    "$$(HOME)",
    "$HOME",
    "$",
    "q'\"\\",
    "new\nline\ttab",
    "",
    "-x",
    "☃\x85",
]


def launch_arguments(on: str) -> list[str]:
    """A typical launch on two hosts, without its parameters."""
    own = ["--partition", "gpu"] if on == "slurm" else ["--image", "registry.example.com/train:1"]
    return ["launch", "--on", on, "--hosts", "2", "--processes-per-host", "4", *own, "--time", "1-12:00:00"]


def a_job(**changes: Any) -> ClusterJob:
    return ClusterJob(
        **{"name": "train", "hosts": 2, "processes_per_host": 4, "script": "train.py", **changes}
    )


def containers(text: str) -> dict[str, Any]:
    """The one container of each replica type."""
    replicas = yaml.safe_load(text)["spec"]["mpiReplicaSpecs"]
    return {kind: replica["template"]["spec"]["containers"][0] for kind, replica in replicas.items()}


def as_kubernetes_passes_on(text: str) -> str:
    """Kubernetes' own rule for arguments and values: `$(NAME)` is replaced, and `$$` is a dollar sign."""
    return re.sub(r"\$(\$|\(HOME\))", lambda match: "$" if match[1] == "$" else "/root", text)


@pytest.mark.parametrize(("on", "file"), [("slurm", "launch.sbatch"), ("kubernetes", "launch.mpijob.yaml")])
def test_a_typical_launch_prints_this_text(on: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = '{"partitions": 4, "microbatches": 8, "ddp": true}'
    arguments = [*launch_arguments(on), "--parameters", parameters]
    assert main([*arguments, "runs/Train_GPT.py", "--lr", "1e-3", "--note", "50% of $5"]) == 0
    assert capsys.readouterr().out == (DATA / file).read_text()


@pytest.mark.parametrize(
    ("on", "file"), [("slurm", "launch_gpus.sbatch"), ("kubernetes", "launch_gpus.mpijob.yaml")]
)
def test_a_launch_on_gpus_prints_this_text(on: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ["--gpus-per-host", "2", "--share-gpus"]
    assert main([*launch_arguments(on), *gpus, "--parameters", '{"partitions": 8}', "train.py"]) == 0
    assert capsys.readouterr().out == (DATA / file).read_text()


def test_without_sharing_each_rank_gets_its_gpu() -> None:
    job = a_job(gpus_per_host=4)
    assert "SHARE_GPUS" not in slurm_script(job) + kubernetes_manifest(job, image="i")
    assert "GPU" not in slurm_script(a_job()).upper()
    assert "GPU" not in kubernetes_manifest(a_job(), image="i").upper()
    a_job(gpus_per_host=8)  # the script may want some for itself


@pytest.mark.parametrize("on", ["slurm", "kubernetes"])
def test_without_parameters_the_script_has_the_word(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*launch_arguments(on), "-m", "pkg.train"]) == 0
    text = capsys.readouterr().out
    assert "SM_HP_MP_PARAMETERS" not in text
    assert "smp_lite.smp_v1" in text and "pkg.train" in text


def test_the_parameters_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parameters.json").write_text('{"partitions": 8}')
    arguments = [*launch_arguments("slurm"), "--parameters", str(tmp_path / "parameters.json"), "train.py"]
    assert main(arguments) == 0
    assert """export SM_HP_MP_PARAMETERS='{"partitions": 8}'\n""" in capsys.readouterr().out


def test_a_short_slurm_job_is_not_signalled_before_it_can_listen() -> None:
    assert "--signal" not in slurm_script(a_job(time_limit="10"))
    assert "#SBATCH --signal=USR1@120\n" in slurm_script(a_job(time_limit="11"))
    assert "--time" not in slurm_script(a_job())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"args": tuple(HOSTILE), "parameters": {"partitions": 8}, "time_limit": "90"},
        {"hosts": 1, "processes_per_host": 1, "script": "pkg.train", "module": True},
        {"gpus_per_host": 4},
    ],
)
def test_a_manifest_is_what_the_operator_takes(changes: dict[str, Any]) -> None:
    manifest = yaml.safe_load(kubernetes_manifest(a_job(**changes), image="train:1"))
    jsonschema.validate(manifest, schema())


def test_the_schema_finds_a_misspelt_field_at_every_level() -> None:
    job = a_job(time_limit="90", gpus_per_host=4)
    manifest = yaml.safe_load(kubernetes_manifest(job, image="train:1"))
    misspelt = list(one_field_misspelt(manifest))
    assert len(misspelt) > 30
    for broken in misspelt:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema())


def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / "mpijob.schema.json").read_text())
    return loaded


def one_field_misspelt(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """A copy of `manifest` for each of its fields, in which that field has an x too many.

    Left out is what lies under `requests` and `limits`: their fields are names of resources, not of the
    schema.
    """

    def paths(node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        return [path for key, value in items for path in ((*above, key), *paths(value, (*above, key)))]

    results = []
    for *above, last in paths(manifest):
        if isinstance(last, str) and not {"requests", "limits"} & set(above):
            broken = copy.deepcopy(manifest)
            node = broken
            for key in above:
                node = node[key]
            node[f"{last}x"] = node.pop(last)
            results.append(broken)
    return results


def test_hostile_arguments_reach_the_script_through_kubernetes() -> None:
    job = a_job(args=tuple(HOSTILE), parameters={"partitions": 8, "partition_file": "$(HOME)/a '\"\n"})
    launcher = containers(kubernetes_manifest(job, image="train:1"))["Launcher"]
    passed = [as_kubernetes_passes_on(argument) for argument in launcher["args"]]
    assert passed[-len(HOSTILE) :] == HOSTILE
    environment = {entry["name"]: as_kubernetes_passes_on(entry["value"]) for entry in launcher["env"]}
    assert json.loads(environment["SM_HP_MP_PARAMETERS"]) == job.parameters


def test_every_text_of_the_user_is_quoted_in_yaml() -> None:
    # Read by the rules of YAML 1.2, a bare 1e-3 is a number, and Kubernetes refuses it as an argument.
    text = kubernetes_manifest(a_job(args=("1e-3", "0o17", "y"), name="y"), image="y")
    scalars = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    theirs = [token.style for token in scalars if token.value in {"1e-3", "0o17", "y"}]
    assert theirs == ['"'] * 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--on", "slurm", "--processes-per-host", "0", "t.py"],
            "processes_per_host must be at least 1, got 0",
        ),
        (["--on", "slurm", "--processes-per-host", "1", "--hosts", "-2", "t.py"], "hosts must be at least 1"),
        (
            ["--on", "slurm", "--processes-per-host", "1", "--image", "i", "t.py"],
            "--image is for --on kubernetes",
        ),
        (
            ["--on", "slurm", "--processes-per-host", "1", "--name", "a\nb", "t.py"],
            r"name 'a\nb': Slurm takes",
        ),
        (["--on", "slurm", "--processes-per-host", "1", "--name", "", "t.py"], "name '': Slurm takes"),
        (["--on", "slurm", "--processes-per-host", "1", "--partition", "a b", "t.py"], "partition 'a b'"),
        (["--on", "slurm", "--processes-per-host", "1", "--time", "1h", "t.py"], "time limit '1h' is none"),
        (["--on", "slurm", "--processes-per-host", "1", "--time", "0", "t.py"], "time limit '0' is none"),
        (["--on", "slurm", "--processes-per-host", "1", "--time", "1:2:3:4", "t.py"], "time limit '1:2:3:4'"),
        (["--on", "slurm", "--processes-per-host", "1", "t.py", "a\0b"], r"'a\x00b' holds a NUL"),
        (["--on", "slurm", "--processes-per-host", "1", "t.py", "\udce9"], r"'\udce9' is not valid UTF-8"),
        (["--on", "slurm", "--processes-per-host", "1", "t.py", ":"], "an argument ':' alone"),
        (["--on", "slurm", "--processes-per-host", "1", ""], "script ''"),
        (
            ["--on", "slurm", "--processes-per-host", "3", "--parameters", '{"partitions": 2}', "t.py"],
            "3 processes",
        ),
        (
            ["--on", "slurm", "--processes-per-host", "2", "--parameters", '{"partitons": 2}', "t.py"],
            "partitons",
        ),
        (["--on", "slurm", "--processes-per-host", "2", "--parameters", "{", "t.py"], "not valid JSON"),
        (["--on", "slurm", "--processes-per-host", "2", "--parameters", "no.json", "t.py"], "no.json"),
        (
            ["--on", "slurm", "--processes-per-host", "4", "--gpus-per-host", "2", "t.py"],
            "processes_per_host is 4, but gpus_per_host 2, and each rank needs a GPU: ask for as many GPUs",
        ),
        (
            ["--on", "slurm", "--processes-per-host", "1", "--gpus-per-host", "-1", "t.py"],
            "gpus_per_host must be 0 or more, got -1",
        ),
        (
            ["--on", "slurm", "--processes-per-host", "1", "--share-gpus", "t.py"],
            "--share-gpus, but gpus_per_host is 0",
        ),
        (
            ["--on", "slurm", "--processes-per-host", "1", "parallel.pipeline=2", "t.py"],
            "parallel.pipeline=2 stands where the script is named, and a cluster's job takes no --config",
        ),
        (["--on", "kubernetes", "--processes-per-host", "1", "t.py"], "--image is missing"),
        (
            ["--on", "kubernetes", "--processes-per-host", "1", "--image", "a b", "t.py"],
            "image 'a b' is none",
        ),
        (["--on", "kubernetes", "--processes-per-host", "1", "--image", "", "t.py"], "image '' is none"),
        (
            ["--on", "kubernetes", "--processes-per-host", "1", "--image", "i", "--partition", "p", "t.py"],
            "--partition is for --on slurm",
        ),
        (
            ["--on", "kubernetes", "--processes-per-host", "1", "--image", "i", "--name", "Train_1", "t.py"],
            "name 'Train_1': Kubernetes takes lower-case letters",
        ),
        (
            ["--on", "kubernetes", "--processes-per-host", "1", "--image", "i", "--name", "a" * 55, "t.py"],
            "is too long by 1: its pods would be called",
        ),
    ],
)
def test_a_bad_option_is_named_and_nothing_is_printed(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("smp-lite launch: ") and told in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--on", "pbs", "--processes-per-host", "1", "t.py"], "--on"),
        (["--processes-per-host", "1", "t.py"], "--on"),
        (["--on", "slurm", "t.py"], "--processes-per-host"),
        (["--on", "slurm", "--processes-per-host", "two", "t.py"], "--processes-per-host"),
        (["--on", "slurm", "--processes-per-host", "1"], "script"),
    ],
)
def test_a_missing_or_unreadable_option_is_named(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *arguments])
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_help_offers_only_what_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    assert "--config" not in shown and "KEY=VALUE" not in shown


def test_a_script_that_looks_like_an_option_of_python_is_refused() -> None:
    with pytest.raises(ValueError, match="'-c' would be taken for an option of python"):
        a_job(script="-c")


def test_the_longest_name_leaves_room_for_the_number_of_the_last_worker() -> None:
    kubernetes_manifest(a_job(name="a" * 54, hosts=10), image="i")
    with pytest.raises(ValueError, match="too long by 1"):
        kubernetes_manifest(a_job(name="a" * 54, hosts=11), image="i")


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("/runs/Train_GPT-2.final.py", "train-gpt-2-final"),
        ("pkg.train", "pkg-train"),
        ("__main__.py", "main"),
        ("2_stages.py", "smp-2-stages"),
        ("été.py", "t"),
        ("___.py", "smp"),
    ],
)
def test_the_name_of_a_job_comes_from_its_script(script: str, name: str) -> None:
    assert job_name(script) == name


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:00", 5400),
        ("1-0", 86400),
        ("1-2:03", 93780),
        ("1-2:03:04", 93784),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(limit: str, seconds: int) -> None:
    assert a_job(time_limit=limit).time_limit_s == seconds


def test_launching_imports_neither_torch_nor_mpi4py() -> None:
    program = (
        "from smp_lite.cli import main; import sys\n"
        f"assert main({[*launch_arguments('kubernetes'), 'train.py']!r}) == 0\n"
        f"assert main({[*launch_arguments('slurm'), 'train.py']!r}) == 0\n"
        "print(*{'torch', 'mpi4py'} & set(sys.modules), end='', file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
