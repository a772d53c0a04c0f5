"""A tiny language model on Debian's fortunes, and the texts of other people than it was trained on.

The command `python examples/fortunes.py` reads the collections of fortunes that Debian's package
`fortunes` puts into /usr/share/games/fortunes (or another folder that is given). The first half of
each short fortune is a prompt, and the rest the answer; each collection is a client. A GPT-2 of two
blocks is trained on five collections for a minute, without `pfl`, and written to `fortunes/model`;
`fortunes/clients.jsonl` has the others. Then `pfl fit --config examples/fortunes.yaml` trains
adapters on these.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pfl.datamodules import InstructionDataModule

PUBLIC = ("cookie", "computers", "miscellaneous", "people", "definitions")
LENGTH, STEPS, BATCH, RATE = 96, 400, 16, 3e-3


def rows(file: Path) -> list[dict[str, str]]:
    """Returns the fortunes of a collection with 40 to 90 bytes, in two halves."""
    found = []
    for text in file.read_text(encoding="utf-8", errors="ignore").split("\n%\n"):
        words = text.split()
        if 40 <= len(" ".join(words).encode()) <= 90:
            half = len(words) // 2
            prompt, answer = " ".join(words[:half]) + " ", " ".join(words[half:])
            found.append({"prompt": prompt, "answer": answer, "user": file.name})
    return found


def write(path: Path, lines: list[dict[str, str]]) -> None:
    """Writes rows as JSON lines."""
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def pretrain(file: Path) -> Any:
    """Returns a GPT-2 of two blocks that was trained on a file of rows."""
    data = InstructionDataModule(file, length=LENGTH)
    inputs, targets = data.samples.gather(torch.arange(len(data.samples)))
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=258, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=257, eos_token_id=257))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        picks = torch.randint(len(inputs), (BATCH,))
        scores = model(inputs[picks]).logits.mT
        loss = torch.nn.functional.cross_entropy(scores, targets[picks])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss:.3f}")
    return model


def main(folder: Path) -> None:
    """Writes model and texts."""
    files = [file for file in sorted(folder.iterdir()) if not file.suffix and not file.is_symlink()]
    if not files:
        sys.exit(f"{folder} has no fortunes: apt install fortunes")
    own = Path("fortunes")
    own.mkdir(exist_ok=True)
    write(
        own / "public.jsonl", [row for file in files if file.name in PUBLIC for row in rows(file)]
    )
    others = [rows(file) for file in files if file.name not in PUBLIC]
    write(own / "clients.jsonl", [row for some in others if len(some) >= 20 for row in some])
    pretrain(own / "public.jsonl").save_pretrained(own / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/games/fortunes"))
