"""What the code of FedSA-LoRA's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run_lora
from benchmarks.agreement.readings.lora import carried
from pfl.algorithms import FedSALoRA

ours = partial(run_lora, FedSALoRA, personal=["*lora_B", "head"])

CASES = [
    Case(
        "FedSALoRA, `share_local_model: False` there",
        "own networks",
        "federatedscope/core/trainers/trainer.py:369-398",
        ("A", "v"),
        ours,
    ),
    Case(
        "FedSALoRA, `share_local_model: True` there",
        "one network",
        "federatedscope/glue/yamls/fedsa-lora.yaml:11, federatedscope/core/fed_runner.py:351",
        ("A", "v"),
        ours,
        "So it is in the configurations that the repository has: all clients are one network, and "
        "B and the head, which are left out of what is sent and received, are kept in it alone. "
        "Every client begins with the B and the head of the client that trained before it, and is "
        "scored with the last ones.",
        partial(run_lora, carried(FedSALoRA), personal=["*lora_B", "head"]),
    ),
]
