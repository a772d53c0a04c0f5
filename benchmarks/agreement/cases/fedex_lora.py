"""What the code of FedEx-LoRA's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run_lora
from benchmarks.agreement.readings.lora import TransposedFedExLoRA
from pfl.algorithms import FedAvg, FedExLoRA

plain = partial(run_lora, weighting="uniform")

CASES = [
    Case(
        "FedExLoRA, `weighting: uniform`, layers as GPT-2's",
        "FedEx-LoRA, transposed",
        "fed_agg.py:89-114",
        ("A", "B", "D", "head"),
        partial(plain, FedExLoRA),
    ),
    Case(
        "FedExLoRA, `weighting: uniform`, linear layers",
        "FedEx-LoRA",
        "fed_agg.py:112",
        ("A", "B", "D", "head"),
        partial(plain, FedExLoRA),
        "The transpose of the residual is added to the frozen weight, whatever the layer is. "
        "GPT-2's layers hold their weights transposed (row above), but those of "
        "`fed_train_glue.py`, query and value of RoBERTa, do not; they are square, so that nothing "
        "stops.",
        partial(plain, TransposedFedExLoRA),
    ),
    Case(
        "FedAvg of LoRA (FedIT), `weighting: uniform`",
        "FedIT",
        "fed_agg.py:20-36",
        ("A", "B", "head"),
        partial(plain, FedAvg),
    ),
    Case(
        "FedAvg of LoRA with `freeze_a` (FFA-LoRA), `weighting: uniform`",
        "FFA-LoRA",
        "fed_agg.py:39-55",
        ("B", "head"),
        partial(plain, FedAvg, freeze_a=True),
    ),
]
