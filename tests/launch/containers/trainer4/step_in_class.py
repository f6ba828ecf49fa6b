"""A script of the shape of AWS's GPT-J example: a Trainer with a loop of its own, whose step function stands
in its class and takes no `self`; and the same training in plain torch beside it.
"""

from __future__ import annotations

import json
import sys

import smdistributed.modelparallel.torch as smp
import torch
from torch.utils.data import Dataset
from transformers import GPTJConfig, GPTJForCausalLM, Trainer, TrainingArguments, get_scheduler, set_seed

VOCABULARY = 61
LENGTH = 10
MICROBATCHES = 2
CONFIG = {
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "rotary_dim": 4,
    # Random numbers are drawn in another order over several stages; without them all is equal.
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (32, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index]}


class StepTrainer(Trainer):
    """Takes from the Trainer what it likes: arguments and data, and no loop."""

    losses: list[float]

    @smp.step
    def train_step(model, optimizer, batch):
        loss = model(input_ids=batch, labels=batch)["loss"]
        model.backward(loss)
        return loss

    def train(self) -> None:
        model = smp.DistributedModel(self.model)
        optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=self.args.learning_rate)
        )
        scheduler = get_scheduler("linear", optimizer, self.args.warmup_steps, self.args.max_steps)
        model.train()
        self.losses = []
        for batch in self.get_train_dataloader():
            optimizer.zero_grad(set_to_none=True)
            loss_mb = self.train_step(model, optimizer, batch["input_ids"])
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            self.losses.append(loss_mb.reduce_mean().item())
        with smp.gathered(model) as module:
            self.weights = {name: value.clone() for name, value in module.state_dict().items()}


def train_plain(model: GPTJForCausalLM, batches: list[torch.Tensor], args: TrainingArguments) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_scheduler("linear", optimizer, args.warmup_steps, args.max_steps)
    model.train()
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for microbatch in batch.chunk(MICROBATCHES):
            loss = model(input_ids=microbatch, labels=microbatch)["loss"] / MICROBATCHES
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        losses.append(total.item())
    return losses


def main(results: str, output: str) -> None:
    # The import of the Trainer has called it already, with what the job says.
    smp.init({"partitions": 2, "microbatches": MICROBATCHES, "ddp": True})
    args = TrainingArguments(
        output,
        no_cuda=True,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        warmup_steps=2,
        max_steps=4,
        report_to=[],
    )
    set_seed(args.seed)
    trainer = StepTrainer(GPTJForCausalLM(GPTJConfig(**CONFIG)), args, train_dataset=RandomTokens())
    trainer.train()

    set_seed(args.seed)
    plain = GPTJForCausalLM(GPTJConfig(**CONFIG))
    plain_trainer = Trainer(plain, args, train_dataset=RandomTokens())
    batches = [batch["input_ids"] for batch in plain_trainer.get_train_dataloader()]
    plain_losses = train_plain(plain, batches, args)
    unlike = [name for name, value in plain.state_dict().items() if not value.equal(trainer.weights[name])]
    if smp.rank() == 0:
        with open(results, "w") as file:
            json.dump({"losses": trainer.losses, "plain_losses": plain_losses, "unlike": unlike}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
