# ruff: noqa: C408
BATCH_SIZE = 64

parallel = dict(
    pipeline=dict(size=2),
    tensor=dict(size=4, mode="2d"),
)
num_microbatches = 4
