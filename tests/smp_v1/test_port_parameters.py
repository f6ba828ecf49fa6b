"""`smp-lite port`: the parameters that scripts and notebooks write, and what becomes of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp_lite.config import Config, ConfigError
from smp_lite.config.v1_parameters import HINTS, INERT, PRIVATE_HINTS
from tests.smp_v1.porting import SMP, Port, line_of, porter


@pytest.fixture
def port(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Port:
    monkeypatch.chdir(tmp_path)
    return porter(tmp_path, capsys)


def complaint(parameters: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as raised:
        Config.from_parameters(parameters)
    return str(raised.value)


GPT = """\
import argparse

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_state_dict_to_hf_gpt2,
)


@smp.step
def train_step(model, optimizer, ids, mask, args):
    loss = model(input_ids=ids, attention_mask=mask, labels=ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, ids):
    return model(ids)["loss"]


def evaluate(model, loader):
    total = sum(test_step(model, ids).reduce_mean() for ids in loader)
    torch.distributed.all_reduce(total, group=smp.get_dp_process_group())
    return total


def train(model, optimizer, loader, args):
    for ids, mask in loader:
        optimizer.zero_grad(set_to_none=True)
        loss_mb = train_step(model, optimizer, ids, mask, args)
        if args.clean_cache > 0:
            torch.cuda.empty_cache()
        if args.fp16:
            optimizer.clip_master_grads(args.grad_clip)
        optimizer.step()
        skipped = args.fp16 and optimizer.overflow
        print(loss_mb.reduce_mean().item(), skipped)
    smp.save_checkpoint(args.dir, tag="t", partial=True, model=model, optimizer=optimizer)


def main(args):
    smp_config = {
        "ddp": True,
        "ddp_dist_backend": "auto",
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": False if args.manual_partition else True,
        "default_partition": 0,
        "static_mode": args.static_mode > 0,
        "fast_mode": args.fast_mode > 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "sdp_hierarchical_allgather": False,
    }
    if args.active_microbatches is not None:
        smp_config["active_microbatches"] = args.active_microbatches
    smp.init(smp_config)
    print(smdistributed.modelparallel.__version__)
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        dtype=torch.get_default_dtype(),
        fused_softmax=args.fused_softmax > 0,
    ):
        model = build(args)
    torch.cuda.set_device(smp.local_rank())
    model = smp.DistributedModel(model, trace_device="gpu")
    for child in model.get_module().transformer.h.children():
        smp.set_activation_checkpointing(child)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    content = smp.resume_from_checkpoint(args.dir, tag=None, partial=True)
    train(model, optimizer, content, args)
    smp.barrier()


if __name__ == "__main__":
    main(argparse.ArgumentParser().parse_args())
"""


def test_what_aws_gpt_script_calls(port: Port) -> None:
    ported = port(GPT)

    assert "depends" not in ported.of.values()
    hints = {"fast_mode", "sdp_hierarchical_allgather"}
    assert {name for name, becomes in ported.of.items() if becomes == "hint"} == {f'"{k}"' for k in hints}
    assert sum(name.startswith('"') for name in ported.rows) == 22
    lines = {
        '"ddp"': '"ddp":',
        '"fp16"': '"fp16"',
        '"active_microbatches"': 'smp_config["active',
        '"sharded_data_parallel_degree"': '"sharded_data',
        "smp.init": "smp.init(",
        "smp.model_creation": "smp.model_creation",
        "smp.tp_size": "smp.tp_size",
        "smp.save_checkpoint": "smp.save",
        "smp.resume_from_checkpoint": "smp.resume",
        "smp.set_activation_checkpointing": "smp.set_act",
        "smp.nn.FusedLayerNorm": "FusedLayerNorm",
        "smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2": "translate_state",
        "smdistributed.modelparallel.__version__": "__version__",
        "DistributedModel.backward": "backward",
        "DistributedModel.get_module": "get_module",
        "DistributedOptimizer.zero_grad": "zero_grad",
        "DistributedOptimizer.clip_master_grads": "clip_master",
        "DistributedOptimizer.overflow": "overflow",
    }
    assert {name: ported.lines(name) for name in lines} == {n: line_of(GPT, p) for n, p in lines.items()}
    assert ported.lines("smp.step") == "13, 20" and ported.lines("StepOutput.reduce_mean") == "26, 41"
    rest = "43 run, 2 hints, 0 refused"
    summary = f"train.py: 23 names and 22 parameters: {rest}"
    assert summary in ported.out.splitlines()
    cuda = f"(lines {line_of(GPT, 'empty_cache')}, {line_of(GPT, 'set_device')})"
    assert f"--cuda-as-cpu {cuda}" in ported.out
    assert ported.code == 0


# Where a dictionary is found --------------------------------------------------------------------------------

INIT = [
    'smp.init({"memory_weight": 2.0, "partitions": 2})',
    'smp.init(config={"memory_weight": 2.0, "partitions": 2})',
    "smp.init(dict(memory_weight=2.0, partitions=2))",
    'd = {"memory_weight": 2.0, "partitions": 2}; smp.init(d)',
    'd: dict = {"partitions": 2}; d["memory_weight"] = 2.0; smp.init(d)',
    'd = {"partitions": 2}; d.update({"memory_weight": 2.0}); smp.init(d)',
    'd = {"partitions": 2}; d.update(memory_weight=2.0); smp.init(d)',
    'd = {"partitions": 2}; d.setdefault("memory_weight", 2.0); smp.init(d)',
    'd = {"partitions": 2}; d |= {"memory_weight": 2.0}; smp.init(d)',
    'd = {"memory_weight": 2.0}; smp.init({**d, "partitions": 2})',
    'd = {"memory_weight": 2.0}; smp.init(dict(d, partitions=2))',
    'd = {"memory_weight": 2.0}; smp.init(dict(**d, partitions=2))',
    'd = {"memory_weight": 2.0}; smp.init({"partitions": 2} | d)',
    'd = {"memory_weight": 2.0}; e = d.copy(); e["partitions"] = 2; smp.init(e)',
    'd = {"memory_weight": 2.0, "partitions": 2}; smp.init(copy.deepcopy(d))',
    'self.d = {"memory_weight": 2.0, "partitions": 2}; smp.init(self.d)',
    'smp.init(d := {"memory_weight": 2.0, "partitions": 2})',
    'K, T = "memory_weight", 2.0; smp.init({K: T, "partitions": 2})',
    'd = {"memory_weight": 0.5, "partitions": 2}; d["memory_weight"] = 2.0; smp.init(d)',
    'd = {"memory_weight": 0.5}; d = {**d, "memory_weight": 2.0, "partitions": 2}; smp.init(d)',
    'x = {"modelparallel": {"enabled": True, "parameters": {"memory_weight": 2.0, "partitions": 2}}}',
    'p = {"memory_weight": 2.0, "partitions": 2}; o = {"parameters": p}; x = {"a": {"modelparallel": o}}',
    "x = dict(modelparallel=dict(parameters=dict(memory_weight=2.0, partitions=2)))",
    'x["modelparallel"] = {"parameters": {"memory_weight": 2.0, "partitions": 2}}',
    'o = {}; o["parameters"] = {"memory_weight": 2.0, "partitions": 2}; x = {"modelparallel": o}',
]


@pytest.mark.parametrize("text", INIT)
def test_a_dictionary_is_found_however_it_is_made(port: Port, text: str) -> None:
    ported = port(SMP + text)

    assert ported.becomes('"memory_weight"') == "refused" and ported.lines('"memory_weight"') in ("2", "1, 2")
    assert ported.says('"memory_weight"') == complaint({"partitions": 2, "memory_weight": 2.0})
    assert ported.becomes('"partitions"') == "runs"
    assert sum(name.startswith(('"', "{")) for name in ported.rows) == 2 and ported.code == 1


@pytest.mark.parametrize(
    "text",
    [
        'd = {"memory_weight": 2.0, "partitions": 2}; d["memory_weight"] = 0.5; smp.init(d)',
        'd = {"memory_weight": 2.0}; smp.init({**d, "memory_weight": 0.5, "partitions": 2})',
        'd = {"memory_weight": 2.0}; smp.init(dict(d, memory_weight=0.5, partitions=2))',
        'd = {"partitions": 2}; e = {}; e["memory_weight"] = 2.0; smp.init(d)',
        'd = {"partitions": 2}\ndef f():\n    d = {}\n    d["memory_weight"] = 2.0\nsmp.init(d)',
    ],
)
def test_what_is_hidden_or_elsewhere_does_not_count(port: Port, text: str) -> None:
    ported = port(SMP + text)

    assert ported.of.get('"memory_weight"', "runs") == "runs" and ported.code == 0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("smp.init(load())", "{**load()}"),
        ("def f(d):\n    smp.init(d)", "{**d}"),
        ("from x import d\nsmp.init(d)", "{**d}"),
        ("smp.init({**d.e, 'partitions': 2})", "{**d.e}"),
        ("smp.init({key: 1, 'partitions': 2})", "{**key}"),
        ("for d in x: smp.init(d)", "{**d}"),
        ("x = {'modelparallel': make()}", None),
        ("x = {'modelparallel': {'parameters': make()}}", "{**make()}"),
    ],
)
def test_keys_that_are_not_to_be_seen_depend(port: Port, text: str, name: str | None) -> None:
    ported = port(SMP + text)

    unread = {row: becomes for row, becomes in ported.of.items() if row.startswith("{")}
    assert unread == ({} if name is None else {name: "depends"}) and ported.code == 0


@pytest.mark.parametrize("text", ["smp.init()", "smp.init(None)", "smp.init('config.json')"])
def test_parameters_that_a_launcher_or_a_file_gives_are_not_judged(port: Port, text: str) -> None:
    assert port(SMP + text).of == {"smp.init": "runs"}


def test_a_variable_that_becomes_several_dictionaries_is_all_of_them(port: Port) -> None:
    text = (
        "d = {'partitions': 2, 'memory_weight': 2.0}\nsmp.init(d)\n"
        "d = {'partitions': 2, 'memory_weight': 0.5}\nsmp.init(d)"
    )
    ported = port(SMP + text)

    assert ported.says('"memory_weight"').startswith("line 2: memory_weight must be between 0.0 and 1.0!")
    assert ported.lines('"memory_weight"') == "2, 4"

    text = "d = {'partitions': 2, 'ddp': True}\nd = {'partitions': 2, 'horovod': True}\nsmp.init(d)"
    assert port(SMP + text).code == 0


def test_a_key_that_is_set_under_a_condition_depends(port: Port) -> None:
    text = (
        "d = {'partitions': 2, 'memory_weight': 0.5}\nif args.half:\n    d['memory_weight'] = 2.0\n"
        "smp.init(d)"
    )
    ported = port(SMP + text)

    key = '"memory_weight"'
    assert (ported.lines(key), ported.becomes(key), ported.code) == ("2, 4", "depends", 0)
    says = "line 4: refused if args.half: memory_weight must be between 0.0 and 1.0!"
    assert ported.says(key).startswith(says)

    text = "d = {'partitions': 2, 'ddp': True}\nif args.hvd:\n    d['horovod'] = True\nsmp.init(d)"
    assert port(SMP + text).code == 0


def test_a_dictionary_that_contains_itself_is_read(port: Port) -> None:
    ported = port(f"{SMP}d = {{'partitions': 2}}\nd = {{**d}}\nd.update(d)\nsmp.init(d)")
    assert ported.becomes('"partitions"') == "runs"


# What becomes of keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"partitions": 2, "ddp": True, "horovod": True}, "horovod"),
        ({"partitions": 2, "ddp_port": 1}, "ddp_port"),
        ({"partitions": 2, "default_partition": 2}, "default_partition"),
        ({"partitions": 2, "auto_partition": False}, "auto_partition"),
        ({"partitions": 2, "load_partition": True}, "load_partition"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "partitions"),
        ({"microbatches": 2}, "partitions"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": 2, "microbatchs": 4}, "microbatchs"),
        ({"partitions": 2, "optimize": "time"}, "optimize"),
        ({"partitions": 2, "random_seed": 4}, "random_seed"),
    ],
)
def test_constant_parameters_are_refused_in_the_configurations_own_words(
    port: Port, parameters: dict[str, object], key: str
) -> None:
    ported = port(f"{SMP}smp.init({parameters!r})")

    assert ported.rows[f'"{key}"'] == ("2", "refused", complaint(parameters))
    others = {f'"{other}"' for other in parameters} - {f'"{key}"'}
    assert {ported.becomes(other) for other in others} <= {"runs"}


def test_every_refused_key_is_named_not_only_the_first(port: Port) -> None:
    ported = port(
        f"{SMP}smp.init({{'partitions': 2, 'memory_weight': 2.0, 'zzz': 1, 'yyy': 1, 'fast_mode': 3, "
        "'ddp': 'yes'})"
    )

    refused = {name for name, becomes in ported.of.items() if becomes == "refused"}
    assert refused == {'"memory_weight"', '"zzz"', '"yyy"', '"fast_mode"', '"ddp"'}
    assert "yyy" not in ported.says('"zzz"')


@pytest.mark.parametrize(
    "written",
    [
        "'ddp_port': 1",
        "'auto_partition': False",
        "'load_partition': True",
        "'default_partition': 7",
        "'ddp_dist_backend': 'gloo'",
        "'ddp': True, 'horovod': True",
        "'ddp': False, 'ddp_port': 1",
    ],
)
def test_where_not_all_keys_are_seen_each_is_judged_alone(port: Port, written: str) -> None:
    ported = port(f"{SMP}smp.init({{**base(), {written}}})")
    assert {name: b for name, b in ported.of.items() if b != "runs"} == {"{**base()}": "depends"}


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"ddp": True, "horovod": True}, "horovod"),
        ({"ddp_port": 1}, "ddp_port"),
        ({"auto_partition": False}, "auto_partition"),
        ({"load_partition": True}, "load_partition"),
    ],
)
def test_written_values_are_held_against_each_other_beside_those_of_the_run(
    port: Port, written: dict[str, object], key: str
) -> None:
    ported = port(f"{SMP}smp.init({{'partitions': args.p, **{written!r}}})")
    assert ported.says(f'"{key}"') == complaint({"partitions": 2, **written}) and ported.code == 1

    ported = port(f"{SMP}smp.init({{'microbatches': args.m, **{written!r}}})")
    assert ported.says('"partitions"').startswith("'partitions' is a required parameter.")


@pytest.mark.parametrize(
    "written",
    [
        "'partitions': args.p, 'ddp': args.d, 'horovod': True, 'ddp_port': 1, 'ddp_dist_backend': 'mpi'",
        "'pipeline_parallel_degree': args.p, 'load_partition': True, 'partition_file': args.f",
        "'partitions': args.p, 'auto_partition': False, 'default_partition': args.d",
        "'partitions': args.p, 'auto_partition': False, 'default_partition': 7",
        "'partitions': args.p, 'pipeline_parallel_degree': 4, 'default_partition': 1",
    ],
)
def test_values_of_the_run_are_given_the_benefit_of_the_doubt(port: Port, written: str) -> None:
    assert set(port(f"{SMP}smp.init({{{written}}})").of.values()) == {"runs"}


def test_beside_values_of_the_run_the_number_of_partitions_counts_if_it_is_written(port: Port) -> None:
    ported = port(f"{SMP}smp.init({{**base(), 'pipeline_parallel_degree': 2, 'default_partition': 2}})")
    assert "from 0 to 1, as partitions is 2" in ported.says('"default_partition"')


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("microbatchs", "unknown parameter 'microbatchs': did you mean 'microbatches'?"),
        ("random_seed", "'random_seed' is not supported yet: leave it out; it belongs to SMP v2"),
    ],
)
def test_a_key_that_is_none_is_refused_whatever_its_value(port: Port, key: str, says: str) -> None:
    ported = port(f"{SMP}smp.init({{'partitions': 2, {key!r}: args.x}})")

    assert ported.becomes(f'"{key}"') == "refused" and ported.says(f'"{key}"').startswith(says)


@pytest.mark.parametrize("key", HINTS)
def test_a_hint_that_asks_for_nothing_runs(port: Port, key: str) -> None:
    for value, becomes in (("True", "hint"), ("False", "runs"), ("args.x", "hint")):
        assert port(f"{SMP}smp.init({{'partitions': 2, {key!r}: {value}}})").becomes(f'"{key}"') == becomes


@pytest.mark.parametrize("key", [*INERT, *PRIVATE_HINTS, "trace_device"])
def test_a_key_without_its_feature_says_so(port: Port, key: str) -> None:
    field = Config.model_fields.get(key)
    is_hint = field is None or str(field.description).startswith("Hint: ")
    value = json.dumps(True if field is None else field.default).capitalize().replace('"gpu"', "'gpu'")
    for written in (value, "args.x"):
        _, becomes, says = port(f"{SMP}smp.init({{'partitions': 2, {key!r}: {written}}})").rows[f'"{key}"']
        assert becomes == ("hint" if is_hint else "runs") and says
        assert is_hint or says.startswith(f"means nothing without {INERT[key]}: ")


# Notebooks --------------------------------------------------------------------------------------------------

CELLS = [
    "%pip install sagemaker\n!ls *.py\npip install x\nimport sagemaker\nhere = !pwd\nx = %env A\nsagemaker?",
    """\
    mp_parameters = {
        "partitions": 2,
        "memory_weight": 2.0,
    }
    """,
    "%%bash\nfor x in *; do echo smp.rank; done",
    """\
    %%writefile train.py
    import smdistributed.modelparallel.torch as smp
    smp.rank()
    """,
    "%%writefile notes.txt\nimport smp_lite.zzz",
    """\
    %%time
    if True:
        !echo one \\
            two
    smp_options = {"enabled": True, "parameters": mp_parameters}
    e = PyTorch(distribution={"smdistributed": {"modelparallel": smp_options}, "mpi": {"enabled": True}})
    """,
    "x = (17\n  % 3)\nmp_parameters['microbatches'] = 4",
]


def test_a_notebook_is_read_cell_by_cell(port: Port) -> None:
    ported = port(files={"job.ipynb": CELLS})

    assert ported.err == ""
    assert {name: row[:2] for name, row in ported.rows.items()} == {
        '"memory_weight"': ("2:3", "refused"),
        '"partitions"': ("2:2", "runs"),
        '"microbatches"': ("7:3", "runs"),
        "smp.rank": ("4:3", "runs"),
    }
    assert ported.code == 1


def test_a_cell_that_is_wrong_is_named(port: Port) -> None:
    for cells, place in (
        (["x = 1", "x = 1\nprint 'two'"], "2:2"),
        (["x = 1", "x = '''a", "'''"], "2:1"),
        (["x = '\ud800'"], "1:1"),
    ):
        ported = port(files={"job.ipynb": cells})
        assert ported.code == 2 and ported.err.startswith(f"smp-lite port: job.ipynb:{place}: ")


def test_lines_in_texts_are_told_by_cell_too(port: Port) -> None:
    refused = "smp.hvd_average_grads"
    cells = [f"{SMP}isinstance(a, {refused})", f"{refused}(b)"]
    assert port(files={"job.ipynb": cells}).says(refused).startswith("line 2:1: belongs to")


def test_old_notebooks_are_read(port: Port) -> None:
    cell = {"cell_type": "code", "input": [SMP, "smp.rank()"]}
    ported = port(files={"job.ipynb": json.dumps({"worksheets": [{"cells": [cell]}]})})
    assert ported.lines("smp.rank") == "1:2"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{\n'cells'", "job.ipynb:2: this is no notebook"),
        ("[]", "job.ipynb: this is no notebook"),
        ("{}", "job.ipynb:"),
    ],
)
def test_what_is_no_notebook_is_an_error(port: Port, text: str, place: str) -> None:
    ported = port(files={"job.ipynb": text})
    assert ported.code == 2 and ported.err.startswith(f"smp-lite port: {place}")
