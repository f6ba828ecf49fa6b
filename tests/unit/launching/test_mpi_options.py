"""The user's own options of mpirun: parsed, refused, and merged with those of the launch."""

from __future__ import annotations

import pytest

from smp_lite.entrypoints.mpi.options import MpiOption, export, flag, mca, merge_options, parse_options


def words(options: tuple[MpiOption, ...]) -> str:
    return " ".join(word for option in options for word in option.words)


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("", ""),
        ("  ", ""),
        # The seed's own, with its space at the end.
        ("--mca btl_vader_single_copy_mechanism none ", "--mca btl_vader_single_copy_mechanism none"),
        # What Open MPI 4 takes and 5 does not.
        ("-bind-to none", "--bind-to none"),
        ("-mca pml ob1 -mca btl ^openib", "--mca pml ob1 --mca btl ^openib"),
        ("--gmca pml ob1", "--mca pml ob1"),
        ("--mca=pml ob1", "--mca pml ob1"),
        ("--bind-to=core", "--bind-to core"),
        ("-verbose -v --verbose", "--verbose --verbose --verbose"),
        ("-display-map --report-bindings", "--display-map --report-bindings"),
        # The toolkit's own option, and the example of its documentation.
        ("--NCCL_DEBUG INFO", "-x NCCL_DEBUG=INFO"),
        ("-NCCL_DEBUG=WARN", "-x NCCL_DEBUG=WARN"),
        ("-verbose -x NCCL_DEBUG=VERSION", "--verbose -x NCCL_DEBUG=VERSION"),
        ("-x LD_PRELOAD -x A= -x B=c=d", "-x LD_PRELOAD -x A= -x B=c=d"),
        ("-x \"A=$(touch x); 'y'\"", "-x A=$(touch x); 'y'"),
        # What happens anyway.
        ("--tag-output -allow-run-as-root --oversubscribe", ""),
        ("-n 4 -np 4 --np 4", "--np 4 --np 4 --np 4"),
        ("--map-by slot -map-by :OVERSUBSCRIBE", "--map-by slot --map-by slot"),
    ],
)
@pytest.mark.parametrize("mpi_major", [4, 5])
def test_every_spelling_comes_out_as_the_one_that_both_versions_take(
    text: str, passed: str, mpi_major: int
) -> None:
    assert words(parse_options(text, mpi_major)) == passed


def test_parameters_of_prrte_and_pmix_are_for_open_mpi_5() -> None:
    text = "--prtemca prte_if_include eth0 --pmixmca gds hash"
    assert words(parse_options(text, 5)) == text
    with pytest.raises(ValueError, match="--prtemca is not an option that can be passed on"):
        parse_options(text, 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("-x 'A=b", r"\"-x 'A=b\" cannot be split into words .*: close the quotation"),
        ("none", r"'none' is no option, and mpirun would run it as a program"),
        ("--bind-to none python evil.py", r"'python' is no option"),
        ("-x A=b c", r"'c' is no option"),
        ("--mca pml", r"--mca pml is incomplete"),
        ("--mca", r"--mca is incomplete: a name and value must follow"),
        ("-x", r"-x is incomplete: a value must follow"),
        ("--mca pml :", r"--mca pml : is incomplete"),
        (": -np 1 sh", r"':' is no option"),
        ("--", r"-- is not an option"),
        ("-", r"- is not an option"),
        ("--no-such-thing", r"--no-such-thing is not an option that can be passed on.* --bind-to POLICY"),
        ("--verbose=3", r"--verbose=3 is not an option"),
        ("--app jobs.txt", r"--app cannot be used: what runs, and where"),
        ("-wdir /", r"-wdir cannot be used: what runs, and where"),
        ("-H other:8", r"-H cannot be used: the hosts are those of the job"),
        ("--hostfile hosts", r"--hostfile cannot be used: the hosts are those of the job"),
        ("-npernode 2", r"-npernode cannot be used: which rank runs on which host"),
        ("--map-by node", r"--map-by node cannot be used: which rank runs on which host"),
        ("--rank-by=core", r"--rank-by=core cannot be used: which rank runs on which host"),
        ("-mca plm_rsh_agent sh", r"--mca plm_rsh_agent sh cannot be used: which hosts take part"),
        ("-mca plm_rsh_args -p2222", r"--mca plm_rsh_args -p2222 cannot be used: which hosts take part"),
        ("-mca orte_default_hostfile h", r"--mca orte_default_hostfile h cannot be used: which hosts"),
        ("-quiet", r"-quiet cannot be used: the launch itself reads what mpirun"),
        ("--tune file", r"--tune cannot be used: settings in files"),
        ("--version", r"--version cannot be used: mpirun would print a text"),
        ("-x 1A=2", r"-x 1A=2 cannot be used: '1A' is not the name of an environment variable"),
        ("-x =2", r"-x =2 cannot be used: '' is not the name of an environment variable"),
        ("--mca -x A", r"--mca -x A cannot be used: '-x' is not the name of a parameter"),
    ],
)
def test_what_cannot_be_passed_on_is_told_by_name(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^custom_mpi_options: {told}"):
        parse_options(text, 5)


@pytest.mark.parametrize(
    "value", ["$(reboot)", "`reboot`", "a;b", "a b", 'a"b', "a\\b", "a\nb", "a|b", "a&b"]
)
def test_a_parameter_has_no_value_that_a_shell_would_act_on(value: str) -> None:
    with pytest.raises(ValueError, match="the value passes through a shell"):
        parse_options(f"--mca btl_base_verbose '{value}'", 5)


OURS = (
    flag("--bind-to", "none").as_default(),
    flag("-np", "4"),
    mca("btl_vader_single_copy_mechanism", "none"),
    mca("btl_tcp_if_include", "eth0"),
    mca("oob_tcp_if_include", "eth0"),
    export("SEED"),
    export("OMP_NUM_THREADS").as_default(),
)


@pytest.mark.parametrize(
    ("users", "merged"),
    [
        ((), OURS),
        ((mca("btl_vader_single_copy_mechanism", "none"),), OURS),
        ((mca("btl_sm_single_copy_mechanism", "none"),), OURS),
        ((mca("prte_if_include", "eth0", "--prtemca"), export("SEED")), OURS),
        ((flag("--bind-to", "core"),), (flag("--bind-to", "core"), *OURS[1:])),
        ((export("OMP_NUM_THREADS", "4"),), (*OURS[:-1], export("OMP_NUM_THREADS", "4"))),
        ((flag("--verbose"), flag("--verbose")), (*OURS, flag("--verbose"))),
        ((mca("pml", "ob1"), mca("pml", "ob1")), (*OURS, mca("pml", "ob1"))),
    ],
)
def test_each_setting_is_passed_once(users: tuple[MpiOption, ...], merged: tuple[MpiOption, ...]) -> None:
    assert merge_options(OURS, users) == merged


@pytest.mark.parametrize(
    ("users", "told"),
    [
        ((mca("btl_tcp_if_include", "lo"),), "--mca btl_tcp_if_include lo contradicts --mca .* eth0,"),
        ((mca("btl_tcp_if_exclude", "lo"),), "--mca btl_tcp_if_exclude lo contradicts --mca .* eth0,"),
        ((mca("btl_sm_single_copy_mechanism", "cma"),), "contradicts --mca btl_vader_single.* none,"),
        ((flag("-np", "2"),), "-np 2 contradicts -np 4, which the launch itself needs: leave it out"),
        ((export("SEED", "7"),), "-x SEED=7 contradicts -x SEED, which"),
        ((mca("pml", "ob1"), mca("pml", "cm")), "--mca pml ob1 and --mca pml cm contradict each other"),
        ((flag("--bind-to", "core"), flag("--bind-to", "socket")), "contradict each other"),
    ],
)
def test_a_contradiction_names_both_sides(users: tuple[MpiOption, ...], told: str) -> None:
    with pytest.raises(ValueError, match=f"^custom_mpi_options: .*{told}"):
        merge_options(OURS, users)
