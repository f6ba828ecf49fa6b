"""Token data as SMP v1 scripts load it: pp rank 0 reads files, the other pp ranks only count along."""

import gzip
import json

import smdistributed.modelparallel.torch as smp
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Lines(Dataset):
    def __init__(self, paths):
        self.input_paths = paths
        self.rows = []
        for path in paths:
            with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
                self.rows += [json.loads(line) for line in file]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return torch.tensor(row["input_ids"]), torch.tensor(row["attention_mask"])


class Dummies(Dataset):
    """As long as the data, and empty."""

    def __init__(self, length):
        self.length = length
        self.input_paths = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.Tensor(0), torch.Tensor(0)


def create_dataloader(paths, batch_size, dp_rank, dp_size):
    if smp.pp_rank() == 0:
        data = Lines(paths)
        smp.broadcast(len(data), smp.PP_GROUP)
    else:
        data = Dummies(smp.recv_from(0, smp.RankType.PP_RANK))
    sampler = DistributedSampler(data, shuffle=False, rank=dp_rank, num_replicas=dp_size, drop_last=True)
    return DataLoader(
        data, sampler=sampler, batch_size=batch_size, num_workers=0, pin_memory=True, drop_last=True
    )
