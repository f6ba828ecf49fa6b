"""``smdistributed.modelparallel.torch`` is smp_lite under another name, and only where a launcher put it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from smp_lite.smp_v1.alias import ALIAS_FOLDER, add_alias, refuse_original
from smp_lite.smp_v1.before_script import prepare
from tests.smp_v1.interpreter import output_of


@pytest.mark.slow
def test_everything_is_the_same_object() -> None:
    found = output_of(
        """
        import smdistributed.modelparallel
        import smdistributed.modelparallel.torch as smp
        from smdistributed.modelparallel.torch.nn import FusedLayerNorm
        from smdistributed.modelparallel.torch.model import DistributedModel
        from smdistributed.modelparallel.torch.optimizers import FusedLAMB, FusedNovoGrad
        from smdistributed.modelparallel.torch.amp import GradScaler
        from smdistributed.modelparallel.torch.utils import rmsg, get_distribution_axis
        from smdistributed.modelparallel.torch.exceptions import SMPError
        from smdistributed.modelparallel.torch.state_mod import state as smp_state
        from smdistributed.modelparallel.test.torch.utils import dump_model, verify
        import smp_lite
        print(smdistributed.modelparallel.__version__)
        print(smp.nn.FusedLayerNorm is FusedLayerNorm is smp_lite.nn.FusedLayerNorm)
        print(smp.model.DistributedModel is DistributedModel is smp_lite.DistributedModel)
        print(smp.optimizers.FusedLAMB is FusedLAMB is smp_lite.optimizers.FusedLAMB)
        print(smp.amp.GradScaler is GradScaler is smp_lite.amp.GradScaler)
        print(smp.utils.rmsg is rmsg is smp_lite.utils.rmsg, get_distribution_axis(None))
        print(smp.exceptions.SMPError is SMPError is smp_lite.SMPError)
        print(smp.state is smp_state is smp_lite.state)
        names = [name for name in smp_lite.__all__ if name != 'amp']
        print(all(getattr(smp, name) is getattr(smp_lite, name) for name in names))
        """
    )
    first, *others = found.splitlines()
    assert first == "1.15.0"
    assert [line.split()[0] for line in others] == ["True"] * 8


@pytest.mark.slow
def test_star_imports_do_not_hide_torch() -> None:
    text = """
        from torch import nn
        from smdistributed.modelparallel.torch import *
        print(nn.__name__, step, DistributedModel.__name__)
        """
    assert output_of(text).startswith("torch.nn <function step")


@pytest.mark.slow
def test_importing_starts_nothing() -> None:
    found = output_of(
        """
        import sys
        import smdistributed.modelparallel.torch as smp
        import torch
        print(smp.is_initialized(), "mpi4py.MPI" in sys.modules, torch.distributed.is_initialized())
        print(sorted(name for name in sys.modules if name.startswith("smdistributed"))[:2])
        """
    )
    assert found.splitlines()[0] == "False False False"


@pytest.mark.slow
def test_the_state_can_be_imported_before_init() -> None:
    found = output_of(
        """
        from smdistributed.modelparallel.torch.state_mod import state
        import smdistributed.modelparallel.torch as smp
        smp.init({"partitions": 1, "prescaled_batch": True})
        print(state.cfg.prescaled_batch, smp.state.cfg.fp16, list(state.module_manager.translate_functions))
        """
    )
    assert found.split() == ["True", "False", "[]"]


def test_what_transformers_looks_for() -> None:
    found = output_of(
        """
        import importlib.util, json
        print(json.dumps([importlib.util.find_spec(name) is not None for name in
            ("smdistributed", "smdistributed.modelparallel", "smdistributed.dataparallel")]))
        """
    )
    assert json.loads(found) == [True, True, False]


@pytest.mark.slow
def test_the_toolkit_finds_error_classes_and_no_others() -> None:
    found = output_of(
        """
        import inspect
        from smdistributed.modelparallel.backend import exceptions
        from smdistributed.modelparallel.torch import exceptions as of_torch
        for module in (exceptions, of_torch):
            kinds = [kind for name in dir(module) if inspect.isclass(kind := getattr(module, name))]
            print(len(kinds), all(issubclass(kind, exceptions.SMPError) for kind in kinds))
        """
    )
    assert found.split() == ["4", "True", "4", "True"]


def test_tensorflow_is_told_apart() -> None:
    found = output_of(
        """
        try:
            import smdistributed.modelparallel.tensorflow as smp
        except ImportError as error:
            print(error)
        """
    )
    assert "smp_lite is for PyTorch" in found


def test_an_interpreter_of_its_own_knows_nothing_of_it() -> None:
    found = output_of(
        "import importlib.util, smp_lite; print(importlib.util.find_spec('smdistributed'))", ready=False
    )
    assert found.strip() == "None"


def test_an_installed_original_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smdistributed" / "modelparallel").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"smdistributed.modelparallel is installed in .* is not smp_lite's"):
        refuse_original([str(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.path)
    for call in (add_alias, lambda: prepare({})):
        with pytest.raises(ValueError, match="uninstall it"):
            call()
    assert sys.path == before


def test_another_part_of_smdistributed_may_be_installed(tmp_path: Path) -> None:
    """SMDDP has the same first name; the alias leaves room for it."""
    package = tmp_path / "smdistributed" / "dataparallel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("found = 1")
    refuse_original([str(tmp_path)])
    found = output_of(
        """
        import smdistributed.dataparallel, smdistributed.modelparallel
        print(smdistributed.dataparallel.found, smdistributed.modelparallel.__version__)
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert found.split() == ["1", "1.15.0"]


def test_it_comes_behind_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["a", "b"])
    add_alias()
    add_alias()
    assert sys.path == ["a", "b", ALIAS_FOLDER]
