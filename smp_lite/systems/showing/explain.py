"""A plan as text, for a person who meets a configuration for the first time.

What the configuration says, each value with the key that said it, and the ranks with their groups. Lines fit
a terminal of 110 columns.
"""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Iterable, Sequence

from ...plan.text_table import text_table
from ..plan.parallel_plan import ParallelPlan, Said, ShardingRule
from .text_parts import bullets, dims_text, group_text, shortened

__all__ = [
    "SYSTEMS",
    "data_text",
    "explain_plan",
    "microbatches_text",
    "schedule_text",
    "settings_table",
    "stages_text",
    "tensor_text",
]

SYSTEMS = {
    "sagemaker": "SageMaker model parallelism (SMP)",
    "enflame": "Enflame DTU",
    "colossal": "Colossal-AI",
    "libai": "LiBai",
    "torchprime": "torchprime",
}
_WHAT_WIDTH, _VALUE_WIDTH, _SAID_WIDTH = 30, 38, 38
_MOST_RANKS, _MOST_RULES = 16, 40
_SCHEDULES = {
    "sequential": "none: one stage works at a time",
    "gpipe": "all forwards, then all backwards (GPipe)",
    "1f1b": "backward first, as soon as one is ready (1F1B)",
    "virtual": "1F1B over the chunks of each rank (virtual stages)",
    "zero_bubble": "1F1B with gradients of parameters where a stage would wait (ZB-H1)",
    "zero_bubble_v": "gradients of parameters where a stage would wait, over two chunks of each rank (ZB-V)",
    "auto": "what is fastest by simulation, with the pieces of each partition",
    "forward": "forwards only",
}
_AXES = {"pp": "pipeline", "dp": "data", "tp": "tensor", "ep": "expert", "cp": "context"}
_STAGES = {
    "libai": "LiBai's rule, by number of layers",
    "uniform": "equal numbers of layers",
    "balanced": "layers balanced by parameters",
    "partitioner": "this library's partitioner",
    "contexts": "smp.partition in the script",
}


def explain_plan(plan: ParallelPlan, source: str) -> str:
    """Returns the text.

    Args:
        plan: of the configuration.
        source: its name, for the title.
    """
    parts = [f"{SYSTEMS[plan.dialect]}: {source}", settings_table(plan)]
    if plan.rules:
        parts.append(_rules(plan.rules))
    parts += [_ranks(plan), _groups(plan)]
    remarks = [f"warning: {text}" for text in plan.warnings] + [f"note: {text}" for text in plan.notes]
    if remarks:
        parts.append(bullets(remarks))
    return "\n\n".join(parts)


def settings_table(plan: ParallelPlan) -> str:
    """Returns what a plan says: a row for each value, with the key that said it."""
    said_ranks = dict(plan.provenance).get("ranks")
    rows: list[tuple[str, str, Said | None]] = [("ranks", str(plan.world_size), said_ranks)]
    order = " x ".join(f"{name} {size}" for name, size in plan.topology.axes if size > 1) or "one rank"
    rows.append(("layout, outer first", order, plan.said("axes")))
    for axis, size in plan.topology.axes:
        role = _AXES[_role(plan, axis)]
        rows.append((f"{role} ({axis})" if axis not in role else axis, str(size), plan.said(f"axis.{axis}")))
    rows.append(("stages", stages_text(plan), plan.said("stages")))
    rows.append(("microbatches", microbatches_text(plan), plan.said("microbatches")))
    rows.append(("schedule", schedule_text(plan), plan.said("schedule")))
    if plan.pp_size > 1:
        rows.append(("waiting", f"{float(plan.bubble):.0%} of a step, if all stages cost the same", None))
    rows.append(("layers shared by", tensor_text(plan), plan.said("tensor")))
    rows.append(("replicas share", data_text(plan), plan.said("data_parallel")))
    if plan.placement.labels:
        rows.append(("devices", f"{len(set(plan.placement.labels))} named", plan.said("placement")))
    for key, value in plan.others:
        rows.append((".".join(key.split(".")[-2:]), str(value), plan.said(f"others.{key}")))
    cells = [line for row in rows for line in _wrapped(*row)]
    return text_table(("what", "value", "said by"), cells, left={"what", "value", "said by"})


def _wrapped(what: str, value: str, said: Said | None) -> Iterable[tuple[str, str, str]]:
    columns = [
        textwrap.wrap(shortened(what, _WHAT_WIDTH), _WHAT_WIDTH),
        textwrap.wrap(value, _VALUE_WIDTH) or [""],
        textwrap.wrap("" if said is None else _said_text(said), _SAID_WIDTH) or [""],
    ]
    return itertools.zip_longest(*columns, fillvalue="")


def _said_text(said: Said) -> str:
    """The key, and where it stands: a file, with the line where that is known, or the command line."""
    if said.is_default or said.file is None:
        return said.text()
    return f"{said.text()}, {os.path.basename(said.file)}"


def _role(plan: ParallelPlan, axis: str) -> str:
    return next(role for role in _AXES if axis in plan.role_axes(role))


def stages_text(plan: ParallelPlan) -> str:
    rule = plan.stages
    if rule.num_stages == 1:
        return "1: the whole model"
    count = f"{rule.num_stages}"
    if rule.num_chunks > 1:
        count += f", {rule.num_chunks} chunks on each rank"
        count += ", there and back" if rule.virtual_stages == "v" else ""
    elif rule.num_stages > plan.pp_size:
        count += f", on {plan.pp_size} sets of ranks"
    if rule.num_layers is not None:
        of_layer = plan.stage_of_layer(rule.num_layers)
        counts = [of_layer.count(stage) for stage in range(rule.num_stages)]
        return f"{count}, with {', '.join(map(str, counts))} of {rule.num_layers} layers"
    how = f"stored in {rule.file}" if rule.kind == "file" else _STAGES[rule.kind]
    if rule.memory_weight is not None:
        how += f", memory weight {rule.memory_weight:g}"
    if rule.default_stage is not None:
        how += f", else stage {rule.default_stage}"
    return f"{count}: {how}"


def microbatches_text(plan: ParallelPlan) -> str:
    batch = plan.microbatches
    of = "a batch is cut into them" if batch.source == "slice" else "each a batch from the loader"
    sizes = "" if batch.size is None else f" of {batch.size} samples"
    text = f"{batch.count}{sizes}" + (f": {of}" if batch.count > 1 else "")
    return text if batch.global_batch_size is None else f"{text}; {batch.global_batch_size} samples a step"


def schedule_text(plan: ParallelPlan) -> str:
    if plan.pp_size == 1:
        return "no pipeline"
    text = _SCHEDULES[plan.schedule.name]
    if plan.schedule.max_in_flight is not None:
        text += f", at most {plan.schedule.max_in_flight} microbatches in flight"
    if plan.schedule.strict is not None:
        wait = "waits until an earlier one has left" if plan.schedule.strict else "starts as soon as it can"
        text += f"; a microbatch {wait}"
    return text


def tensor_text(plan: ParallelPlan) -> str:
    tensor = plan.tensor
    if tensor.mode == "enflame":
        way = (
            "inputs are split, results summed"
            if tensor.sharding_dim == 0
            else "outputs are split, then gathered"
        )
        return f"{plan.tp_size} ranks: {way}" + ("" if tensor.fuse else ", each layer by itself")
    if tensor.mode == "rules":
        return f"{len(plan.rules)} rules by name"
    if tensor.mode is None or plan.tp_size == 1:
        return "nobody: each rank has whole layers"
    if tensor.mode == "smp":
        batch = "the same batch" if dict(plan.others).get("prescaled_batch") else "each its own batch"
        return f"{plan.tp_size} ranks ({batch}): modules under smp.tensor_parallelism"
    if tensor.mode == "sequence":
        return f"{plan.tp_size} ranks: whole layers, a share of the sequence"
    return f"{plan.tp_size} ranks, {tensor.mode}" + (f" of depth {tensor.depth}" if tensor.depth else "")


def data_text(plan: ParallelPlan) -> str:
    policy = plan.data_parallel.policy
    texts = {
        "none": "nothing: there is one replica",
        "ddp": "gradients (ddp)",
        "horovod": "gradients (horovod)",
        "fsdp": "parameters, gradients and optimizer (fsdp)",
        "handlers": f"gradients, by {', '.join(plan.data_parallel.handlers)}",
        "zero1": "optimizer state in parts (ZeRO-1; runs as ZeRO-3)",
        "zero2": "gradients, optimizer in parts (ZeRO-2; runs as ZeRO-3)",
        "zero3": "parameters, gradients and optimizer in parts (ZeRO-3)",
    }
    return texts[policy] if plan.dp_size > 1 or policy == "none" else f"{texts[policy]}; one replica here"


def _rules(rules: Sequence[ShardingRule]) -> str:
    what = {"activation": "output", "parameter": "tensor", "either": "tensor or output"}
    rows = [(shortened(rule.name or '""', 60), dims_text(rule.dims), what[rule.target]) for rule in rules]
    hidden = len(rows) - _MOST_RULES
    rows = rows[:_MOST_RULES] + ([(f"and {hidden} more", "", "")] if hidden > 0 else [])
    return text_table(("rule for", "split over", "of a"), rows, left={"rule for", "split over", "of a"})


def _ranks(plan: ParallelPlan) -> str:
    axes = [name for name, size in plan.topology.axes if size > 1]
    labels = plan.placement.labels
    with_stages = plan.stages.num_stages > 1
    header = ["rank", *axes, *(["stages"] if with_stages else []), *(["device"] if labels else [])]
    shown: list[int | None] = list(range(plan.world_size))
    if plan.world_size > _MOST_RANKS:
        shown = [*range(_MOST_RANKS - 4), None, plan.world_size - 1]
    rows = []
    for rank in shown:
        if rank is None:
            rows.append(["..."] * len(header))
            continue
        at = plan.topology.coordinate(rank)
        row = [str(rank), *(str(at[axis]) for axis in axes)]
        row += [group_text(plan.stages_of_rank(rank))] if with_stages else []
        rows.append(row + ([labels[rank]] if labels else []))
    return text_table(header, rows, left={"device"})


def _groups(plan: ParallelPlan) -> str:
    by_groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for kind, _ in plan.topology.kinds:
        by_groups.setdefault(plan.topology.groups(kind), []).append(kind)
    rows, alone = [], []
    for groups, kinds in by_groups.items():
        if len(groups[0]) == 1:
            alone = kinds
            continue
        for index, line in enumerate(_kind_lines(kinds)):
            first = (
                (str(len(groups)), str(len(groups[0])), _group_list(groups)) if not index else ("", "", "")
            )
            rows.append((line, *first))
    header = ("groups", "how many", "of ranks", "members")
    lines = text_table(header, rows, left={"groups", "members"}) if rows else ""
    if alone:
        lines += ("\n" if lines else "") + f"groups of one rank: {', '.join(alone)}"
    return lines


def _kind_lines(kinds: Sequence[str]) -> list[str]:
    return textwrap.wrap(", ".join(kinds), 28)


def _group_list(groups: Sequence[Sequence[int]]) -> str:
    texts: list[str] = []
    for group in groups:
        more = f" and {len(groups) - len(texts)} more"
        if len(" ".join([*texts, f"[{group_text(group)}]"])) + len(more) > 58:
            return " ".join(texts) + more
        texts.append(f"[{group_text(group)}]")
    return " ".join(texts)
