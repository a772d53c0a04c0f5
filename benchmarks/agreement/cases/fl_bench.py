"""What FL-bench computes, method by method."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import public, run
from benchmarks.agreement.problem import ALL, EPOCHS, HEAD_EPOCHS, PUBLIC_PICKS, RATE
from benchmarks.agreement.readings import common, fl_bench
from pfl.algorithms import (
    APFL,
    CFL,
    MOON,
    SCAFFOLD,
    Ditto,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedBABU,
    FedDyn,
    FedLC,
    FedMD,
    FedPer,
    FedProx,
    FedRep,
    FedYogi,
    LGFedAvg,
    PerFedAvg,
    pFedMe,
)

MOREAU: dict[str, Any] = dict(
    penalty=2.0, personal_steps=3, personal_lr=0.1, lr=RATE, server_mixture=0.8
)
META: dict[str, Any] = dict(alpha=RATE, lr=0.3, batch_size=None)
ADAGRAD: dict[str, Any] = dict(server_lr=0.1, tau=0.01, beta=0.9)
ADAPTIVE: dict[str, Any] = dict(server_lr=0.1, tau=0.01, betas=(0.9, 0.99))
SPLITTING: dict[str, Any] = dict(mean_norm=10.0, largest_norm=0.1)
SIMPLEX: dict[str, Any] = dict(endpoints=3, radius=0.1, simplex=["head.weight"])
PUBLIC: dict[str, Any] = dict(public_samples=PUBLIC_PICKS, digest_epochs=EPOCHS)
FROM_ZERO = "v begins at 0 instead of τ²."
NEW_HEADS = (
    "The personal layers are averaged with all others, and a client that takes part for the first "
    "time begins with that mean instead of the initial values. With all clients in every round "
    "nothing differs."
)

CASES = [
    Case("FedAvg", "FedAvg", "client/fedavg.py:205", ("w",), partial(run, FedAvg)),
    Case(
        "FedProx",
        "FedProx",
        "client/fedprox.py:24",
        ("w",),
        partial(run, FedProx, proximal_weight=0.3),
    ),
    Case(
        "SCAFFOLD",
        "SCAFFOLD",
        "server/scaffold.py:34",
        ("w", "server c"),
        partial(run, SCAFFOLD, local_steps=4),
        "The server hands out c_i and never stores the new ones, so that c_i = 0 in every round. "
        "`local_epoch` counts steps.",
        partial(run, fl_bench.ForgettingSCAFFOLD, local_steps=4),
    ),
    Case(
        "FedDyn",
        "FedDyn",
        "client/feddyn.py:31-32",
        ("w",),
        partial(run, FedDyn, alpha=0.4),
        "α <θ, θ^t> is subtracted and α/2 ‖θ‖² is not added, so that the local problem has no "
        "proximal term; the mean of the models is weighted by samples.",
        partial(run, fl_bench.SampledFedDyn, pulled=False, alpha=0.4),
    ),
    Case(
        "FedDyn, `optimizer.weight_decay` = α",
        "FedDyn, weight decay",
        "client/feddyn.py:31-32",
        ("w",),
        partial(run, FedDyn, alpha=0.4),
        "That setting adds the missing term. What remains is the weighted mean: with equal sizes "
        "both agree.",
        partial(run, fl_bench.SampledFedDyn, alpha=0.4),
    ),
    Case(
        "Ditto",
        "Ditto",
        "client/ditto.py:57",
        ("w", "v"),
        partial(run, Ditto, penalty=0.5, personal_epochs=EPOCHS),
    ),
    Case(
        "APFL, α fixed",
        "APFL",
        "client/apfl.py:62-65",
        ("w",),
        partial(run, APFL, alpha=0.6),
        "Nothing clears the gradient of w before the second step of the common optimizer, so that "
        "w takes each step twice: it is FedAvg with twice the rate. The mixture is one of "
        "outputs, not of models (62).",
        partial(run, FedAvg, lr=2 * RATE),
    ),
    Case(
        "PerFedAvg, first order",
        "PerFedAvg FO",
        "client/perfedavg.py:26",
        ("w",),
        partial(run, PerFedAvg, variant="FO", **META),
    ),
    Case(
        "PerFedAvg, Hessian-free",
        "PerFedAvg HF",
        "client/perfedavg.py:26",
        ("w",),
        partial(run, PerFedAvg, variant="HF", **META),
    ),
    Case(
        "FedRep",
        "FedRep",
        "client/fedavg.py:37, 181",
        ("v",),
        partial(run, FedRep, head_epochs=HEAD_EPOCHS),
        NEW_HEADS,
        partial(run, common.with_averaged_heads(FedRep), head_epochs=HEAD_EPOCHS),
    ),
    Case(
        "FedPer",
        "FedPer",
        "client/fedavg.py:37, 181",
        ("v",),
        partial(run, FedPer),
        NEW_HEADS,
        partial(run, common.with_averaged_heads(FedPer)),
    ),
    Case(
        "LGFedAvg",
        "LGFedAvg",
        "client/lgfedavg.py:17",
        ("v",),
        partial(run, LGFedAvg),
        "The first `num_global_layers` layers are shared and the last ones are personal; the "
        "paper shares the last ones. With two layers this is FedPer. The first personal layers "
        "are those of FedPer above.",
        partial(run, common.with_averaged_heads(LGFedAvg), personal="head"),
    ),
    Case("FedBABU, training", "FedBABU", "client/fedbabu.py:24", ("w",), partial(run, FedBABU)),
    Case(
        "FedBABU, weight decay 0.2",
        "FedBABU, weight decay",
        "client/fedbabu.py:24",
        ("w",),
        partial(run, FedBABU, weight_decay=0.2),
        "The gradient of the head is set to 0 and the optimizer decays the head all the same. "
        "Without weight decay, the default, both agree.",
        partial(run, fl_bench.DecayingHeadFedBABU, weight_decay=0.2),
    ),
    Case(
        "pFedMe",
        "pFedMe",
        "client/pfedme.py:47-87, server/pfedme.py:36",
        ("w", "v"),
        partial(run, pFedMe, **MOREAU),
        "θ_i starts where the last local step left it instead of at w_i, its gradient has `mu` "
        "θ_i more (87; 0.001 unless set), and the mean is weighted by samples. No θ_i is ever "
        "stored (server/pfedme.py:36), so that the first model is what is scored as personalized.",
        partial(run, fl_bench.UntrainedpFedMe, **MOREAU),
    ),
    Case(
        "FedAdagrad",
        "FedAdagrad",
        "server/fedopt.py:81",
        ("w",),
        partial(run, FedAdagrad, **ADAGRAD),
        FROM_ZERO,
        partial(run, common.from_zero(FedAdagrad), **ADAGRAD),
    ),
    Case(
        "FedAdam",
        "FedAdam",
        "server/fedopt.py:81",
        ("w",),
        partial(run, FedAdam, **ADAPTIVE),
        FROM_ZERO,
        partial(run, common.from_zero(FedAdam), **ADAPTIVE),
    ),
    Case(
        "FedYogi",
        "FedYogi",
        "server/fedopt.py:81",
        ("w",),
        partial(run, FedYogi, **ADAPTIVE),
        FROM_ZERO,
        partial(run, common.from_zero(FedYogi), **ADAPTIVE),
    ),
    Case(
        "MOON",
        "MOON",
        "client/moon.py:16-22",
        ("w",),
        partial(run, MOON, temperature=0.5, contrast=2.0),
        "A client that takes part for the first time has the received model as its last one.",
        partial(run, fl_bench.FirstReceivedMOON, temperature=0.5, contrast=2.0),
    ),
    Case(
        "FedMD",
        "FedMD",
        "client/fedavg.py:38, 183-186",
        ("v",),
        lambda: run(FedMD, public=public(), **PUBLIC),
        "What a client has trained is kept by nobody: its list of personal parameters is empty, so "
        "that every round begins with the first model, and all agree about the public inputs.",
        lambda: run(fl_bench.ForgettingFedMD, public=public(), **PUBLIC),
    ),
    Case(
        "FedMD, trained models kept there",
        "FedMD, kept",
        "client/fedmd.py:26-34, server/fedmd.py:92-129",
        ("v",),
        lambda: run(FedMD, public=public(), **PUBLIC),
        "A round begins with the scores of its clients, to which these are then drawn; the "
        "distance is the squared one. New public inputs are added to a list of which only the "
        "first ones, those of the first round, are used.",
        lambda: run(fl_bench.FirstInputsFedMD, public=public(), **PUBLIC),
    ),
    Case("FedLC", "FedLC", "client/fedlc.py:12-34", ("w",), partial(run, FedLC, calibration=0.8)),
    Case(
        "CFL",
        "CFL",
        "server/cfl.py:53-66, 84-90",
        ("v",),
        partial(run, CFL, cohorts=ALL, **SPLITTING),
        "The parts of a cluster are the places of clients in it (61-64), not their numbers, so "
        "that after a second split clients are in several clusters or in none. The parts come from "
        "complete linkage, which is not always the split with the least similarity across; "
        "clusters of two, and the first rounds, are not split.",
        partial(run, fl_bench.PlacesCFL, cohorts=ALL, **SPLITTING),
    ),
    Case(
        "Floco, `simplex: [head.weight]`",
        "Floco",
        "server/floco.py:43-55, 115-137",
        ("server endpoints", "v"),
        partial(run, fl_bench.GivenFloco, projection_round=2, **SIMPLEX),
        "At the round τ all clients train once more before it; the centres are found from what "
        "this turn made of the heads, instead of from the clients' last changes before, and "
        "nothing else of it is used.",
        partial(fl_bench.projected_after_a_turn, 2, **SIMPLEX),
    ),
]
