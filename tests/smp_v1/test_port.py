"""`smp-lite port`: the names of SMP in a script, and what becomes of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import smp_lite
from smp_lite.cli import main
from smp_lite.smp_v1.names import NAMES, Name
from tests.smp_v1.porting import SMP, Port, porter


@pytest.fixture
def port(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.chdir(tmp_path)
    return porter(tmp_path, capsys)


METHODS = ("DistributedModel.", "DistributedOptimizer.", "StepOutput.")


@pytest.mark.parametrize(
    ("text", "name", "lines"),
    [
        ("import smdistributed.modelparallel.torch as smp\nsmp.rank()", "smp.rank", "2"),
        (
            "import smdistributed.modelparallel.torch\nsmdistributed.modelparallel.torch.rank()",
            "smp.rank",
            "2",
        ),
        ("from smdistributed.modelparallel import torch as smp\nsmp.rank()", "smp.rank", "2"),
        ("from smdistributed.modelparallel.torch import rank as r\n\nr()", "smp.rank", "1, 3"),
        (
            "from smdistributed.modelparallel.torch import (\n    size,\n    rank,\n)\nrank()",
            "smp.rank",
            "3, 5",
        ),
        ("from smdistributed.modelparallel.torch import *\nrank()", "smp.rank", "2"),
        ("from smdistributed.modelparallel.torch import amp\namp.GradScaler()", "smp.amp.GradScaler", "2"),
        ("from smdistributed.modelparallel.torch.amp import GradScaler", "smp.amp.GradScaler", "1"),
        ("import smdistributed.modelparallel.torch.amp as a\na.GradScaler()", "smp.amp.GradScaler", "2"),
        ("import smp_lite as smp\nprint(f'{smp.rank()}')", "smp.rank", "2"),
        ("from smp_lite import rank", "smp.rank", "1"),
        ("import smp_lite.amp\nsmp_lite.amp.GradScaler()", "smp.amp.GradScaler", "2"),
        ("def f():\n    import smp_lite as smp\n    return smp.rank()", "smp.rank", "3"),
        (
            "try:\n    import smp_lite as smp\nexcept ImportError:\n    smp = None\nsmp.rank()",
            "smp.rank",
            "5",
        ),
        ("def f():\n    global smp\n    import smp_lite as smp\ndef g():\n    smp.rank()", "smp.rank", "5"),
        ("import smp_lite as smp\nsmp.state.cfg.fp16", "smp.state.cfg", "2"),
        (
            "import smp_lite as smp\n@smp.step\ndef f(): pass\n@smp.step(a=1)\ndef g(): pass",
            "smp.step",
            "2, 4",
        ),
        ("import smp_lite as smp\nx = [smp.rank()\n     for smp.rank in (smp.rank,)]", "smp.rank", "2, 3"),
        (f"{SMP}s = smp\nt: object = s\nt.rank()", "smp.rank", "4"),
        (f"{SMP}nn = smp.amp\nnn.GradScaler()", "smp.amp.GradScaler", "3"),
        (f"{SMP}s, x = smp, 1\ndef f():\n    return s.rank()", "smp.rank", "4"),
        (f"s = None\nif a:\n    {SMP}    s = smp\ns.rank()", "smp.rank", "5"),
        (
            f"{SMP}class A:\n    def f(self):\n        self.smp = smp\n    x = self.smp.rank()",
            "smp.rank",
            "5",
        ),
        (f"{SMP}r = smp.rank\nr()", "smp.rank", "2, 3"),
        (f"{SMP}getattr(smp, 'rank')()", "smp.rank", "2"),
        (f"{SMP}NAME = 'rank'\nr = getattr(smp, NAME, None)\nr()", "smp.rank", "3, 4"),
        (f"{SMP}getattr(getattr(smp, 'amp'), 'GradScaler')()", "smp.amp.GradScaler", "2"),
    ],
)
def test_a_name_is_found_however_it_is_imported(port: Port, text: str, name: str, lines: str) -> None:
    ported = port(text)

    assert ported.rows[name] == (lines, "runs", NAMES[name.removeprefix("smp.")].says)
    assert ported.code == 0


@pytest.mark.parametrize(
    "text",
    [
        "def f(rank):\n    return rank()",
        "def f(*, rank=0):\n    return rank()",
        "def f():\n    rank = 1\n    return rank",
        "def f():\n    def rank(): pass\n    return rank()",
        "lambda rank: rank",
        "[rank for rank in ()]",
        "{rank: rank for x in () for rank in x}",
        "class A:\n    def rank(self): return self.rank",
    ],
)
def test_another_variable_of_its_name_is_not_it(port: Port, text: str) -> None:
    assert port(f"from smp_lite import rank\n{text}").lines("smp.rank") == "1"


@pytest.mark.parametrize(
    "text",
    [
        "s = smp\ns = other()\ns.zzz()",
        "for s in (smp, other): s.zzz()",
        "s, t = smp\ns.zzz()",
        "s = t\nt = s\ns.zzz()",
        "getattr(smp, name).zzz()",
        "def getattr(a, b): pass\ngetattr(smp, 'zzz')",
        "getattr(other, 'zzz')",
    ],
)
def test_a_name_that_may_be_something_else_is_not_smp(port: Port, text: str) -> None:
    assert port(f"{SMP}{text}").rows == {}


def test_a_refused_name_is_found_by_another_name_of_the_module(port: Port) -> None:
    ported = port(f"{SMP}s = smp\ns.hvd_average_grads(1)\ng = getattr(smp, 'hvd_average_grads')\ng(1)")
    assert ported.becomes("smp.hvd_average_grads") == "refused"
    assert ported.lines("smp.hvd_average_grads") == "3, 4, 5"


def test_a_default_may_make_up_for_an_unknown_name(port: Port) -> None:
    ported = port(f"{SMP}getattr(smp, 'zzz')\ngetattr(smp, 'yyy', None)")
    assert ported.of == {"smp.zzz": "refused", "smp.yyy": "depends"}
    assert "or default, does not make up for it" in ported.says("smp.yyy")


def test_a_class_hides_a_name_from_itself_but_not_from_its_methods(port: Port) -> None:
    text = "from smp_lite import rank\nclass A:\n    rank = 1\n    x = rank\n    def f(self):\n        rank()"
    assert port(text).lines("smp.rank") == "1, 6"


def test_what_stands_outside_a_scope_is_looked_up_there(port: Port) -> None:
    text = "[rank for rank in rank()]\ndef f(rank=rank()): pass\n@rank\ndef g(rank): pass"
    assert port(f"from smp_lite import rank\n{text}").lines("smp.rank") == "1, 2, 3, 4"


def test_a_name_may_be_bound_for_another_function(port: Port) -> None:
    text = "def f():\n  smp = 0\n  def g():\n    nonlocal smp\n    import smp_lite as smp\n  smp.rank()"
    assert port(text).lines("smp.rank") == "6"


def test_every_name_of_the_table_becomes_what_the_table_says(port: Port) -> None:
    own = [path for path in NAMES if not path.startswith(METHODS)]
    methods = [path for path in NAMES if path.startswith(METHODS)]
    lines = [SMP.strip(), "DistributedModel = smp.DistributedModel(m)"]
    lines += ["DistributedOptimizer = smp.DistributedOptimizer(o)", "StepOutput = smp.step(f)(m)"]
    ported = port("\n".join(lines + [f"smp.{path}" for path in own] + methods))

    for n, path in enumerate(own + methods, len(lines) + 1):
        places, becomes, says = ported.rows[path if path in methods else f"smp.{path}"]
        assert becomes == NAMES[path].status, path
        assert places.split(", ")[-1] == str(n) or path in (
            "DistributedModel",
            "DistributedOptimizer",
            "step",
        )
        assert says == ("belongs to " if becomes == "refused" else "") + NAMES[path].says
    assert len(ported.rows) == len(NAMES)


def test_names_of_smp_lite_alone_run(port: Port) -> None:
    own = [name for name in smp_lite.__all__ if name not in NAMES and name not in ("amp",)]
    ported = port("\n".join(["import smp_lite as smp", *(f"smp.{name}" for name in own)]))

    assert ported.of == {f"smp.{name}": "runs" for name in own}
    assert "gathered" in own


def test_modules_of_smp_lite_are_no_names_of_smp(port: Port) -> None:
    ported = port("from smp_lite.estimator import PyTorch\nimport smp_lite\nprint(smp_lite.__version__)")

    assert ported.rows == {} and "no name of it" in ported.out


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        (f"{SMP}smp.tp_ranks()", "smp.tp_ranks", "did you mean smp.tp_rank?"),
        (f"{SMP}smp.FusedLayerNorm", "smp.FusedLayerNorm", "did you mean smp.nn.FusedLayerNorm?"),
        (f"{SMP}smp.verify", "smp.verify", "did you mean smp.test.torch.utils.verify?"),
        (f"{SMP}smp.zzz.yyy.xxx", "smp.zzz", "no public script or document has this name"),
        (f"{SMP}smp.nn.zzz.yyy", "smp.nn.zzz", "no public script"),
        (
            "from smdistributed.modelparallel.torch.nn.huggingface.j import x",
            "smp.nn.huggingface.j",
            "unknown",
        ),
        ("import smdistributed.modelparallel.torch.zzz", "smp.zzz", "unknown"),
        ("import smdistributed.modelparallel.zzz", "smdistributed.modelparallel.zzz", "unknown"),
    ],
)
def test_a_name_that_nobody_knows_is_refused(port: Port, text: str, name: str, hint: str) -> None:
    ported = port(text)

    assert ported.becomes(name) == "refused" and hint in ported.says(name)
    assert ported.code == 1


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (
            "import smdistributed.modelparallel.tensorflow as smp\nsmp.x()",
            "modelparallel.tensorflow",
            "PyTorch",
        ),
        ("from smdistributed.modelparallel import tensorflow as x\nx", "modelparallel.tensorflow", "PyTorch"),
        ("import smdistributed.dataparallel.torch.distributed as d\nd.f()", "dataparallel", "ddp: True"),
        ("from smdistributed.dataparallel.torch import parallel\nparallel.D", "dataparallel", "ddp: True"),
    ],
)
def test_other_libraries_are_refused(port: Port, text: str, name: str, says: str) -> None:
    ported = port(text)

    assert ported.rows.keys() == {f"smdistributed.{name}"} and ported.code == 1
    assert ported.lines(f"smdistributed.{name}") == "1, 2"
    assert says in ported.says(f"smdistributed.{name}")


@pytest.mark.parametrize(
    "text",
    [
        "import torch.sagemaker as tsm\ntsm.init()",
        "import torch\ntorch.sagemaker.init()",
        "from torch import sagemaker\nsagemaker.init()",
        "from torch.sagemaker import init\ninit()",
    ],
)
def test_version_two_is_refused(port: Port, text: str) -> None:
    ported = port(text)

    assert ported.of == {"torch.sagemaker": "refused"} and "2" in ported.lines("torch.sagemaker")
    assert "SMP v2" in ported.says("torch.sagemaker")


def test_the_version_and_the_errors_run(port: Port) -> None:
    text = """\
        import smdistributed.modelparallel
        from smdistributed.modelparallel.backend.exceptions import SMPError
        from smdistributed.modelparallel.torch.exceptions import SMPMismatch
        print(smdistributed.modelparallel.__version__)
    """
    ported = port(text)

    assert "1.15.0" in ported.says("smdistributed.modelparallel.__version__")
    assert ported.lines("smdistributed.modelparallel.__version__") == "4"
    assert ported.code == 0


def test_a_missing_name_may_be_imported_and_asked_for(port: Port) -> None:
    text = f"""\
        {SMP.strip()}
        from smdistributed.modelparallel.torch import hvd_average_grads as L
        isinstance(m, smp.hvd_average_grads)
        isinstance(m, (int, L))
    """
    name = "smp.hvd_average_grads"
    ported = port(text)
    assert ported.of == {name: "runs"}
    assert "any other use is refused: belongs to Horovod's own averaging" in ported.says(name)
    assert ported.lines(name) == "2, 3, 4"

    ported = port(f"{text.rstrip(' ')}        isinstance(L(2, 2), int)\n")
    assert ported.becomes(name) == "refused"
    assert ported.says(name).startswith("line 5: belongs to Horovod's own averaging")


# Objects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "lines"),
    [
        ("model = smp.DistributedModel(net)\nmodel.backward(loss)", "DistributedModel.backward", "3"),
        ("model = net\nmodel = smp.DistributedModel(model)\nmodel.join()", "DistributedModel.join", "4"),
        (
            "def f(model): model.backward(1)\nmodel = smp.DistributedModel(n)",
            "DistributedModel.backward",
            "2",
        ),
        ("self.m = smp.DistributedModel(n)\nself.m.module.x.y", "DistributedModel.module", "3"),
        ("m: object = smp.DistributedModel(n)\nself.m = m\nself.m.cpu()", "DistributedModel.cpu", "4"),
        ("m, o = smp.DistributedModel(n), o\nm.cpu()", "DistributedModel.cpu", "3"),
        ("m = smp.DistributedModel(n) if a else n\nm.cpu()", "DistributedModel.cpu", "3"),
        ("smp.DistributedModel(\n    n\n).cpu()", "DistributedModel.cpu", "4"),
        ("(m := smp.DistributedModel(n))\nm.cpu()", "DistributedModel.cpu", "3"),
        ("o = smp.DistributedOptimizer(o)\no.loss_scale", "DistributedOptimizer.loss_scale", "3"),
        ("o = smp.DistributedOptimizer(o)\no.loss_scaler.x", "DistributedOptimizer.loss_scaler", "3"),
        ("@smp.step\ndef f(): pass\nx = f()\nx.reduce_mean().item()", "StepOutput.reduce_mean", "5"),
        ("@smp.step()\ndef f(): pass\nx = f()['a']\nx.concat()", "StepOutput.concat", "5"),
        ("f = smp.step(g)\na, b = f()\nb.stack()", "StepOutput.stack", "4"),
        ("f = smp.step(g)\nf(\n    1\n).reduce_sum()", "StepOutput.reduce_sum", "5"),
    ],
)
def test_methods_of_objects_are_found(port: Port, text: str, name: str, lines: str) -> None:
    ported = port(SMP + text)

    assert ported.lines(name) == lines
    assert (ported.becomes(name), ported.code) == (NAMES[name].status, NAMES[name].status == "refused")


def test_torchs_own_methods_and_other_objects_are_not_listed(port: Port) -> None:
    text = "model = smp.DistributedModel(n)\nmodel.train().cuda()\nother.backward()\n"
    text += "a, b = smp.DistributedModel(n)\na.cpu()"
    assert port(SMP + text).of == {"smp.DistributedModel": "runs"}


# Arguments and conditions -----------------------------------------------------------------------------------


@pytest.fixture
def _an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name of the table is refused for an argument now; the command can tell, so it is asked of a table
    in which some are."""
    for name, argument, says in (
        ("model_creation", "tensor_parallelism", "dtype holds inside"),
        ("tensor_parallelism", "enabled", "enabled=False"),
        ("set_tensor_parallelism", "enabled", "enabled=False"),
    ):
        monkeypatch.setitem(NAMES, name, Name(name, "runs", says, (argument, (True,))))


@pytest.mark.usefixtures("_an_argument_is_refused")
@pytest.mark.parametrize(
    ("call", "becomes", "says"),
    [
        ("model_creation()", "runs", "dtype holds inside"),
        ("model_creation(dtype=d, tensor_parallelism=False)", "runs", "dtype"),
        (
            "model_creation(tensor_parallelism=True)",
            "refused",
            "tensor_parallelism=True: this value is not",
        ),
        ("model_creation(1)", "refused", "tensor_parallelism=1"),
        (
            "model_creation(tensor_parallelism=smp.tp_size() > 1 or a.b > 0)",
            "depends",
            "(here smp.tp_size() > 1 or",
        ),
        ("model_creation(**options)", "depends", "(here options)"),
        ("model_creation(*options)", "depends", "(here *options)"),
        ("model_creation(tensor_parallelism=OFF)", "runs", "dtype"),
        ("model_creation(tensor_parallelism=ON)", "refused", "tensor_parallelism=True"),
        ("model_creation(tensor_parallelism=TWICE)", "depends", "(here TWICE)"),
        ("model_creation(tensor_parallelism=PART)", "depends", "(here PART)"),
        ("tensor_parallelism()", "refused", "enabled is True unless it is written"),
        ("tensor_parallelism(fused_softmax=True)", "refused", "enabled is True unless it is written"),
        ("tensor_parallelism(False)", "runs", "enabled=False"),
        ("tensor_parallelism(enabled=args.tp)", "depends", "refused if enabled is True (here args.tp)"),
        ("set_tensor_parallelism(m)", "refused", "write another"),
        ("set_tensor_parallelism(*options)", "depends", "(here *options)"),
        ("set_tensor_parallelism(m, False)", "runs", "enabled=False"),
        ("set_tensor_parallelism(True, enabled=False)", "runs", "enabled=False"),
    ],
)
def test_an_argument_decides(port: Port, call: str, becomes: str, says: str) -> None:
    constants = "OFF = False\nON = True\nTWICE = False\nfor TWICE in (): pass\nPART, _ = 'ab'\n"
    ported = port(f"{SMP}{constants}with smp.{call}: pass")

    name = f"smp.{call.partition('(')[0]}"
    assert ported.becomes(name) == becomes and says in ported.says(name)
    assert ported.code == (becomes == "refused")


@pytest.mark.usefixtures("_an_argument_is_refused")
def test_the_worst_use_decides_and_is_named(port: Port) -> None:
    text = "import smp_lite as smp\nsmp.set_tensor_parallelism(a, False)\nsmp.set_tensor_parallelism(b)\n"
    text += "smp.set_tensor_parallelism(c, c.on)\nsmp.set_tensor_parallelism(d)"
    lines, becomes, says = port(text).rows["smp.set_tensor_parallelism"]

    assert (lines, becomes) == ("2, 3, 4, 5", "refused")
    assert says.startswith("lines 3, 5: enabled is True")


@pytest.mark.usefixtures("_an_argument_is_refused")
def test_uses_are_told_in_the_order_of_their_lines(port: Port) -> None:
    text = "def f():\n    smp.tensor_parallelism(a)\nsmp.tensor_parallelism(b)"
    first, second = port(SMP + text).says("smp.tensor_parallelism").split("; line ")
    assert first.startswith("line 3: refused if enabled is True (here a)") and second.startswith("4: ")


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("if a.b > 0:\n    smp.hvd_average_grads(x)", "a.b > 0"),
        ("if a:\n    pass\nelse:\n    smp.hvd_average_grads(x)", "not (a)"),
        ("if a:\n    pass\nelif b:\n    smp.hvd_average_grads(x)", "not (a) and b"),
        ("if a:\n    def f():\n        if b: smp.hvd_average_grads(x)", "a and b"),
        ("y = smp.hvd_average_grads(x) if a else 0", "a"),
        ("y = 0 if a else smp.hvd_average_grads(x)", "not (a)"),
        ("a and b and smp.hvd_average_grads(x)", "a and b"),
        ("a or smp.hvd_average_grads(x)", "not (a)"),
        ("match a:\n    case 1:\n        smp.hvd_average_grads(x)", "case 1"),
    ],
)
def test_what_only_the_run_reaches_depends(port: Port, text: str, condition: str) -> None:
    ported = port(SMP + text)

    assert ported.becomes("smp.hvd_average_grads") == "depends" and ported.code == 0
    assert ported.says("smp.hvd_average_grads").startswith(f"refused if {condition}: belongs to Horovod's")


@pytest.mark.parametrize(
    "text",
    [
        "if __name__ == '__main__':\n    smp.hvd_average_grads(x)",
        "if smp.hvd_average_grads(x):\n    pass",
        "def f():\n    for x in y:\n        smp.hvd_average_grads(x)",
        "if a: smp.hvd_average_grads(x)\nsmp.hvd_average_grads(x)",
    ],
)
def test_what_is_reached_anyway_is_refused(port: Port, text: str) -> None:
    assert port(SMP + text).code == 1


def test_an_import_that_may_fail_depends_on_what_the_script_does_then(port: Port) -> None:
    text = "try:\n    import smdistributed.dataparallel\nexcept {}:\n    pass"

    for error in ("ImportError", "(OSError, ModuleNotFoundError)", "Exception"):
        assert port(text.format(error)).of == {"smdistributed.dataparallel": "depends"}
    assert port(text.format("KeyError")).of == {"smdistributed.dataparallel": "refused"}
    text = "try:\n    import x\nexcept ImportError:\n    import smdistributed.dataparallel"
    assert port(text).of == {"smdistributed.dataparallel": "refused"}


# CUDA, and other notes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.set_device(0)",
        "x.cuda()",
        "d = torch.device('cuda')",
        "d = 'cuda:1'",
        "d = f'cuda:{i}'",
        "from torch import cuda",
        "from torch.cuda import amp",
        "import torch.cuda",
    ],
)
def test_words_of_cuda_are_noted(port: Port, text: str) -> None:
    ported = port(f"import torch\n\n{text}")

    note = "- speaks of CUDA: on a machine without GPU run it with --cuda-as-cpu (line 3)"
    assert note in ported.out.splitlines() and ported.code == 0


@pytest.mark.parametrize("text", ["x.cpu()", "print('cuda is fine')", "torch.load('cudart')", "cuda = 1"])
def test_other_words_are_not(port: Port, text: str) -> None:
    assert "CUDA" not in port(f"import torch\n{text}").out


def test_each_line_of_cuda_is_counted_once_and_the_first_are_shown(port: Port) -> None:
    text = "import torch\ntorch.cuda.a(torch.cuda.b, 'cuda')\n" + "x.cuda()\n" * 4
    assert "(lines 2, 3, 4, 5, ...)" in port(text).out


def test_a_script_with_smps_own_import_is_told_how_to_start(port: Port) -> None:
    assert "- imports smdistributed (line 1): smp-lite run finds" in port(SMP).out
    assert "smp-lite run" not in port("import smp_lite as smp").out


# The command ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_an_argument_is_refused")
def test_a_table_the_worst_first_and_a_summary(port: Port) -> None:
    text = f"""\
        {SMP.strip()}
        smp.rank()
        smp.model_creation(x)
        smp.hvd_average_grads(x)
        smp.init({{"partitions": 2, "fast_mode": True}})
        for _ in range(3):
            smp.rank(); smp.rank()
            smp.rank()
            smp.rank()
            smp.rank()
    """
    ported = port(text)

    assert list(ported.of.values()) == ["refused", "depends", "hint", "runs", "runs", "runs"]
    assert ported.lines("smp.rank") == "2, 7, 8, 9, ..."
    summary = "train.py: 4 names and 2 parameters: 3 run, 1 hint, 1 depends on a value, 1 refused"
    assert summary in ported.out.splitlines()

    short = port(text, "--refused")
    assert list(short.of.values()) == ["refused", "depends"] and short.code == 1
    assert summary in short.out.splitlines()


def test_files_and_folders_have_a_total(port: Port) -> None:
    files = {
        "a.py": f"{SMP}smp.rank()",
        "job/b.py": f"{SMP}smp.hvd_average_grads(x)\nsmp.size()",
        "job/deep/c.py": "print(1)",
        "job/.hidden/d.py": "smp is no Python",
        "job/notes.txt": "neither",
    }
    ported = port("", "a.py", "job", "a.py", "job/b.py", files=files)

    lines = ported.out.splitlines()
    assert lines.count("a.py: 1 name and 0 parameters: 1 runs, 0 refused") == 1
    assert "job/deep/c.py: nothing of SMP in it" in lines
    assert lines[-1] == "all 3 files: 3 names and 0 parameters: 2 run, 1 refused"
    assert ported.code == 1


@pytest.mark.parametrize(
    ("content", "place", "why"),
    [
        (b"x = 1\nprint 'two'\n", "bad.py:2", "not Python 3"),
        (b"x = 1\ny = '\xff'\n", "bad.py:2", "not utf-8 text"),
        (b"# coding: zzz\n", "bad.py:1", "zzz"),
        (b"x = 1\0\n", "bad.py:1", "null bytes"),
        (b"x = 1\ry = 2\rprint 'three'\r", "bad.py:3", "not Python 3"),
        (None, "bad.py", "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    port: Port,
    tmp_path: Path,
    content: bytes | None,
    place: str,
    why: str,
) -> None:
    if content is not None:
        (tmp_path / "bad.py").write_bytes(content)
    ported = port("", "bad.py", "good.py", files={"good.py": f"{SMP}smp.hvd_average_grads(x)"})

    assert ported.code == 2
    assert ported.err.startswith(f"smp-lite port: {place}: ") and why in ported.err
    assert ported.becomes("smp.hvd_average_grads") == "refused"  # the others are read all the same


def test_files_of_other_encodings_and_ends_of_lines_are_read(port: Port, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_bytes(
        b"# coding: latin-1\r\nimport smp_lite as smp\r\nx = '\xff'\rsmp.rank()\r\n"
    )
    assert port("", "old.py", files={}).lines("smp.rank") == "4"


def test_a_folder_without_scripts_is_an_error(port: Port, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ported = port("", "empty", files={})
    assert (ported.code, ported.err) == (2, "smp-lite port: empty: no .py file in this folder\n")


def test_on_a_terminal_the_table_is_as_wide_as_that(
    port: Port,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"{SMP}smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2(x)\n"
    text += "smp.model_creation(tensor_parallelism=a)"
    assert max(map(len, port(text).out.splitlines())) > 150

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for columns in (70, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = port(text).out
        table = out[: out.index("train.py: 2 names")].splitlines()
        assert columns - 15 < max(map(len, table)) <= columns
        assert "".join(line.partition(" ")[0] for line in table[3:8]).startswith(
            "smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2"
        )


def test_a_deeply_nested_script_is_read(port: Port) -> None:
    assert port(f"{SMP}x = {'+'.join(['1'] * 900)}\nsmp.rank()").lines("smp.rank") == "3"


def test_it_runs_nothing_and_imports_no_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{SMP}import torch\nraise SystemExit('it ran')")
    program = f"""
import sys
from smp_lite.cli import main
assert main(["port", {str(script)!r}]) == 0
assert not {{"torch", "mpi4py", "numpy"}} & set(sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "imports SMP, and uses no name of it" in ended.stdout


def test_the_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "{run,launch,plan,explain,check,port}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["port"])
    assert "FILE" in capsys.readouterr().err
