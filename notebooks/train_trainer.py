"""A GPT-2 by the Trainer of transformers, over pipeline partitions and replicas: no training loop in here.

It needs no download: the model is made from a small configuration, and the text is the Python library's own
source, byte by byte. In the folder of this file:

    pip install 'transformers>=5,<6' accelerate
    smp-lite run --processes 4 train_trainer.py --steps 30

Another number of partitions:

    smp-lite run --processes 4 --parameters '{"partitions": 4, "microbatches": 4}' train_trainer.py --steps 30

Stopped and started again with --resume it goes on where it was, over other partitions too. What it saves,
``trained/``, is read by ``GPT2LMHeadModel.from_pretrained`` anywhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from text import read_text
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import smp_lite as smp
from smp_lite.integrations.transformers import Trainer

LENGTH = 64


class Lines(Dataset):
    """Pieces of the text: each rank gives the same ones, and the Trainer shares them out."""

    def __init__(self, text: torch.Tensor, count: int) -> None:
        self.text, self.count = text, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="trained")
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()

    smp.init({"partitions": 2, "microbatches": 2, "ddp": True})
    set_seed(1)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    text = read_text(300_000).long()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=asked.output,
            per_device_train_batch_size=8,  # of one replica
            max_steps=asked.steps,
            learning_rate=3e-3,
            warmup_steps=5,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=15,
            save_steps=15,
            save_total_limit=2,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=Lines(text, 4000),
        eval_dataset=Lines(text[4000 * LENGTH :], 32),
    )
    trainer.train(resume_from_checkpoint=asked.resume)
    trainer.save_model()
    if smp.rank() == 0:
        print("weights:", sorted(path.name for path in Path(asked.output).glob("*.safetensors")))


if __name__ == "__main__":
    main()
