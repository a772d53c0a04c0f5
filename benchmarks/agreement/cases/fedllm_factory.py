"""What FedLLM-Factory computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run_lora
from benchmarks.agreement.readings.lora import (
    CarriedRoLoRA,
    MixedFedExLoRA,
    RootedFlexLoRA,
    UnscaledFLoRA,
    carried,
)
from pfl.algorithms import FedAvg, FedDPA, FedExLoRA, FedSALoRA, FlexLoRA, FLoRA, RoLoRA

ours = partial(run_lora, head=False)

CASES = [
    Case(
        "FedAvg of LoRA (FedIT)",
        "fedit",
        "alg/ftbase.py:57-69",
        ("A", "B"),
        partial(ours, FedAvg),
    ),
    Case(
        "FedAvg of LoRA with `freeze_a` (FFA-LoRA)",
        "ffalora",
        "alg/ffalora.py:10-18",
        ("B",),
        partial(ours, FedAvg, freeze_a=True),
    ),
    Case(
        "FedSALoRA",
        "fedsalora",
        "alg/fedsalora.py:8, alg/ftbase.py:52-55",
        ("A", "v"),
        partial(ours, FedSALoRA, personal=["*lora_B"]),
        "No B is kept (8) and none is set back (55): every client begins with the B of the client "
        "that trained before it, and all are scored with the last one.",
        partial(ours, carried(FedSALoRA), personal=["*lora_B"]),
    ),
    Case(
        "RoLoRA",
        "rolora",
        "alg/rolora.py:15, alg/ftbase.py:52-55",
        ("A", "B"),
        partial(ours, RoLoRA),
        "A comes first, which has no gradient where B is 0. After a client only the factor that "
        "was averaged last is set back (55), which is the other one: every client begins with the "
        "factor that the client before it left.",
        partial(ours, CarriedRoLoRA),
    ),
    Case(
        "FlexLoRA",
        "flexlora",
        "alg/flexlora.py:48-58",
        ("update",),
        partial(ours, FlexLoRA),
        "B A = U S^(1/2) V' / s where s sum p_i B_i A_i = U S V': one of the two roots of S is "
        "missing. s is an option of its own (11), not α / r.",
        partial(ours, RootedFlexLoRA),
    ),
    Case(
        "FLoRA",
        "flora",
        "alg/flora.py:37-39",
        ("D",),
        partial(ours, FLoRA),
        "The mean of the products is added without s = α / r, and clients begin with the same A in "
        "every round, since the first one is loaded again.",
        partial(ours, UnscaledFLoRA),
    ),
    Case(
        "FedExLoRA",
        "fedexlora",
        "alg/fedexlora.py:39-45",
        ("A", "B", "D"),
        partial(ours, FedExLoRA),
        "The mean of the products is weighted by samples and those of the factors are not, so that "
        "the change is not what the means miss; it is added without s = α / r.",
        partial(ours, MixedFedExLoRA),
    ),
    Case(
        "FedDPA, global adapter",
        "feddpa",
        "alg/feddpa.py:26-42",
        ("A", "B"),
        partial(ours, FedDPA, pair=0.5),
        "The global adapter is trained with the factor 1, and its mean is weighted by samples: it "
        "is that of FedIT. The personal one begins as a copy of it, and where both are used A is "
        "mixed with A and B with B instead of the outputs (36, 118).",
        partial(ours, FedAvg),
    ),
]
