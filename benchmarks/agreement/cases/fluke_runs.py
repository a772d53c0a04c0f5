"""What fluke computes, method by method."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import BODY, EPOCHS, HEAD_EPOCHS, RATE, Iterates
from benchmarks.agreement.readings import fluke
from pfl.algorithms import (
    APFL,
    SCAFFOLD,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAMP,
    FedAvg,
    FedBABU,
    FedDyn,
    FedPer,
    FedProx,
    FedRep,
    FedYogi,
    LGFedAvg,
    PerFedAvg,
    pFedMe,
)

MOREAU: dict[str, Any] = dict(
    penalty=2.0, personal_steps=3, personal_lr=RATE, lr=RATE, server_mixture=0.8
)
META: dict[str, Any] = dict(alpha=RATE, lr=0.3, variant="FO", batch_size=None, local_epochs=4)
ADAGRAD: dict[str, Any] = dict(server_lr=0.1, tau=0.01, beta=0.9)
ADAPTIVE: dict[str, Any] = dict(server_lr=0.1, tau=0.01, betas=(0.9, 0.99))
AMP: dict[str, Any] = dict(alpha=1.0, sigma=5.0, alpha_decay=1.0)
TWICE = (
    "v begins at 0 instead of τ² (61), and the server's rate multiplies Δ (66, by server.py:380), "
    "and the step once more (88)."
)


def body() -> Iterates:
    return {"w": run(FedBABU)["w"][:, :BODY]}


CASES = [
    Case("FedAvg", "FedAvg", "client.py:360, server.py:380", ("w",), partial(run, FedAvg)),
    Case(
        "FedProx",
        "FedProx",
        "algorithms/fedprox.py:60",
        ("w",),
        partial(run, FedProx, proximal_weight=0.3),
    ),
    Case(
        "SCAFFOLD, `weighted: false` there",
        "SCAFFOLD",
        "algorithms/scaffold.py:113-121",
        ("w", "server c"),
        partial(run, SCAFFOLD),
    ),
    Case(
        "FedDyn",
        "FedDyn",
        "algorithms/feddyn.py:106, 158-172, 249",
        ("w",),
        partial(run, FedDyn, alpha=0.4),
        "g_i is added where it should be subtracted (158), and times α once more than in the "
        "paper; α is divided by the client's relative number of samples. Clients begin at the "
        "mean model + the mean of the cohort's g_i (249) instead of the mean - h / α; in their "
        "first round (106), and for the scores, at the mean model, which is weighted by samples.",
        partial(run, fluke.OtherSignFedDyn, alpha=0.4),
    ),
    Case(
        "Ditto",
        "Ditto",
        "algorithms/ditto.py:87",
        ("w", "v"),
        partial(run, Ditto, penalty=0.5, personal_epochs=EPOCHS),
    ),
    Case(
        "APFL, α fixed",
        "APFL",
        "algorithms/apfl.py:91, 105",
        ("w", "v"),
        partial(run, APFL, alpha=0.6),
        "The mixture is a copy (91), so that no gradient reaches v_i, which is never trained; "
        "after each round the mixture with the new w_i replaces it (105).",
        partial(run, fluke.MixingAPFL, alpha=0.6),
    ),
    Case(
        "PerFedAvg, first order",
        "PerFedAvg",
        "algorithms/per_fedavg.py:162, 173",
        ("w",),
        partial(run, PerFedAvg, **META),
        "The parameters are not set back after the inner step (162), from which the outer step "
        "then goes on (173): w - α g(w) - β g(w - α g(w)).",
        partial(run, fluke.AdaptedPerFedAvg, **META),
    ),
    Case(
        "FedRep",
        "FedRep",
        "algorithms/fedrep.py:100",
        ("v",),
        partial(run, FedRep, head_epochs=HEAD_EPOCHS),
    ),
    Case("FedPer", "FedPer", "algorithms/fedper.py:58", ("v",), partial(run, FedPer)),
    Case("LGFedAvg", "LGFedAvg", "algorithms/lg_fedavg.py:62", ("v",), partial(run, LGFedAvg)),
    Case("FedBABU, training", "FedBABU", "algorithms/fedbabu.py:62", ("w",), body),
    Case(
        "pFedMe",
        "pFedMe",
        "algorithms/pfedme.py:125, 134",
        ("w", "v"),
        partial(run, pFedMe, **MOREAU),
        "The step gets the model's own parameters as w_i (125), so that λ (θ - w_i) is 0; the θ_i "
        "of K plain steps on each mini-batch, with 0.001 θ_i, are what is sent and scored. η is "
        "the rate of θ_i, too.",
        partial(run, fluke.PlainpFedMe, **MOREAU),
    ),
    Case(
        "FedAMP",
        "FedAMP",
        "algorithms/fedamp.py:59, 91",
        ("v",),
        partial(run, FedAMP, penalty=0.5, **AMP),
        "u_i is made after a round and waits for the client's next one, in which local steps "
        "begin at w_i instead of u_i. The proximal term has λ / η instead of λ / α (59). Scored "
        "is u_i.",
        partial(run, fluke.LateFedAMP, penalty=0.05, **AMP),
    ),
    Case(
        "FedAdagrad",
        "FedAdagrad",
        "algorithms/fedopt.py:61-88",
        ("w",),
        partial(run, FedAdagrad, **ADAGRAD),
        TWICE,
        partial(run, fluke.twice_the_rate(FedAdagrad), **ADAGRAD),
    ),
    Case(
        "FedAdam",
        "FedAdam",
        "algorithms/fedopt.py:61-88",
        ("w",),
        partial(run, FedAdam, **ADAPTIVE),
        TWICE,
        partial(run, fluke.twice_the_rate(FedAdam), **ADAPTIVE),
    ),
    Case(
        "FedYogi",
        "FedYogi",
        "algorithms/fedopt.py:61-88",
        ("w",),
        partial(run, FedYogi, **ADAPTIVE),
        TWICE,
        partial(run, fluke.twice_the_rate(FedYogi), **ADAPTIVE),
    ),
]
