"""``join_shards.py FOLDER FILE`` joins a checkpoint of sharded data parallelism into one file: plain torch.

The rule of its files: a parameter of n elements is padded to a multiple of the number of shards, and each
shard holds the same number of them, one parameter after another in the order of ``param_shapes``.
"""

import math
import pathlib
import sys

import torch

folder, target = map(pathlib.Path, sys.argv[1:])
user = torch.load(folder / "user_content.pt", weights_only=False)
paths = sorted(folder.glob("optimizer_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
states = [torch.load(path, weights_only=False) for path in paths]
counts = [state["partition_count"] for state in states]
count = max(max(c) if isinstance(c, list) else c for c in counts)
if count != len(paths):
    raise SystemExit(f"{count} shards were saved, and {len(paths)} files are here")
flats = [torch.cat(list(state["fp32_flat_groups"])) for state in states]
module = torch.load(folder / "model_0.pt", weights_only=False)["module"]
joined = {name: module[name] for name in user["buffer_names"] if name in module}
start = 0
for shapes in user["param_shapes"]:
    for name, shape in shapes.items():
        size = math.prod(shape)
        length = -(-size // count)
        whole = torch.cat([flat[start : start + length] for flat in flats])
        joined[name.removeprefix("module.")] = whole[:size].view(*shape)
        start += length
if any(start != len(flat) for flat in flats):
    raise SystemExit(f"shards hold {[len(flat) for flat in flats]} elements, and the shapes ask for {start}")
torch.save(joined, target)
