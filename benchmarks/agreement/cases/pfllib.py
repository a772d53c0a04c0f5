"""What PFLlib computes, method by method."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import network, run
from benchmarks.agreement.problem import (
    ALL,
    BODY,
    CLASSES,
    EPOCHS,
    FEATURES,
    GENERATOR,
    HEAD_EPOCHS,
    HIDDEN,
    MADE,
    NOISE,
    RATE,
    ROUNDS,
    SIZES,
    Iterates,
    arrays,
    started,
)
from benchmarks.agreement.readings import common, fedgen, pfllib
from pfl.algorithms import (
    APFL,
    APPLE,
    FML,
    GPFL,
    MOON,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAMP,
    FedAS,
    FedAvg,
    FedBABU,
    FedCP,
    FedDBE,
    FedDistill,
    FedDyn,
    FedFomo,
    FedGen,
    FedGH,
    FedKD,
    FedLC,
    FedNTD,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedRoD,
    LGFedAvg,
    LocalTrain,
    PerFedAvg,
    pFedMe,
)
from pfl.method import FederatedAlgorithm, MessengerMethod
from pfl.models.classifier import Classifier

MOREAU: dict[str, Any] = dict(
    penalty=2.0, personal_steps=3, personal_lr=0.1, lr=RATE, server_mixture=0.8
)
META: dict[str, Any] = dict(alpha=RATE, variant="FO", batch_size=None)
MIXED: dict[str, Any] = dict(share=1.0, batch_size=None)
DOMAIN: dict[str, Any] = dict(penalty=3.0, momentum=0.6)
MUTUAL: dict[str, Any] = dict(alpha=0.6, beta=0.3)
DISTILLED: dict[str, Any] = dict(distillation=1.0, first_energy=0.6, last_energy=0.9)
JUDGED: dict[str, Any] = dict(models=2, judged_on="training", exploration=0.0)
HEAD: dict[str, Any] = dict(server_lr=0.5, server_batch_size=None)


def known_mean() -> Iterates:
    """FedDBE whose mean is that of a first round of all clients, whose models are forgotten."""
    first = run(FedDBE, cohorts=ALL, **DOMAIN)["server mean"][0]
    return run(pfllib.starting_mean(first), **DOMAIN)


def with_messenger(kind: type[MessengerMethod], of: nn.Module, **settings: Any) -> Iterates:
    """The iterates of a method whose messenger is as the clients' network."""
    found = run(kind, of=of, messenger=copy.deepcopy(of), **settings)
    size = sum(values.numel() for values in of.parameters())
    return {
        "client u": found["client head"][..., :size],
        "client W": found["client head"][..., size:],
        "m": found["w"][:, size : 2 * size],
    }


def wider() -> nn.Module:
    """The network with one more class, which nobody has."""
    body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
    made = Classifier(body, nn.Linear(HIDDEN, CLASSES + 1)).double()
    count = sum(values.numel() for values in made.parameters())
    nn.utils.vector_to_parameters(torch.from_numpy(started(count, 0)), made.parameters())
    return made


def of_valves(kind: type[FederatedAlgorithm]) -> Iterates:
    """The iterates of GPFL by their parts."""
    found = run(kind, penalty=0.4, shared_decay=0.2)
    vectors = CLASSES * HIDDEN  # come first; the conditions last
    valve = vectors + len(arrays()[2])
    return {
        "φ, h": found["v"][..., vectors:valve],
        "valve": found["w"][:, valve : -2 * HIDDEN],
        "vectors": found["w"][:, :vectors],
    }


def of_policies(kind: type[FederatedAlgorithm], **settings: Any) -> Iterates:
    """The iterates of FedCP by their parts."""
    found = run(kind, penalty=1.5, **settings)
    body = HIDDEN + BODY  # after the context
    head = len(arrays()[2]) - BODY
    return {
        "body": found["w"][:, HIDDEN:body],
        "head": found["w"][:, body + head : body + 2 * head],
        "policy": found["w"][:, body + 2 * head :],
        "client h": found["client head"][..., HIDDEN:],
    }


def of_vectors(kind: type[FederatedAlgorithm]) -> Iterates:
    """The iterates of APPLE, with p instead of what has been added to its first values."""
    found = run(
        kind,
        cohorts=ALL,
        relationship_lr=0.2,
        penalty=0.5,
        scheduler="cosine",
        penalized_rounds=ROUNDS // 2,
    )
    return {"v": found["v"], "p": found["client change"] + np.array(SIZES) / sum(SIZES)}


FEATURES_MADE: dict[str, Any] = dict(
    generated=MADE,
    noise=NOISE,
    hidden=GENERATOR,
    server_steps=3,
    server_batch_size=MADE,
    server_lr=0.05,
)

CASES = [
    Case("FedAvg", "FedAvg", "clients/clientavg.py:12", ("w",), partial(run, FedAvg)),
    Case(
        "FedProx",
        "FedProx",
        "optimizers/fedoptimizer.py:74",
        ("w",),
        partial(run, FedProx, proximal_weight=0.3),
    ),
    Case(
        "SCAFFOLD",
        "SCAFFOLD",
        "clients/clientscaffold.py:73, servers/serverscaffold.py:127",
        ("w", "client c_i"),
        partial(run, SCAFFOLD),
    ),
    Case(
        "FedDyn",
        "FedDyn",
        "clients/clientdyn.py:45",
        ("w", "client g"),
        partial(run, FedDyn, alpha=0.4),
        "The proximal term is α/2 ‖θ - θ^t‖ instead of α/2 ‖θ - θ^t‖², so that its pull has the "
        "length α/2 wherever θ is.",
        partial(run, pfllib.NormFedDyn, alpha=0.4),
    ),
    Case(
        "Ditto",
        "Ditto",
        "clients/clientditto.py:64",
        ("w", "v"),
        partial(run, Ditto, penalty=0.5, personal_epochs=EPOCHS),
    ),
    Case(
        "APFL",
        "APFL",
        "clients/clientapfl.py:50-59, 73, 76",
        ("w", "v"),
        partial(run, APFL, alpha=0.6),
        "The mean is weighted by samples. v_i takes plain SGD steps at v_i, not at the mixture "
        "(50), and the mixture then replaces it (59), so that the next round mixes once more. α_i "
        "adapts in every step (56), with a mixture of gradients at two points (73) and 0.02 α_i "
        "(76), and cannot be held fixed.",
        partial(run, pfllib.StoredMixtureAPFL, alpha=0.6, adaptive=True),
    ),
    Case(
        "PerFedAvg, first order",
        "PerAvg",
        "servers/serverperavg.py:35-36",
        ("w",),
        partial(run, PerFedAvg, local_epochs=1, **META),
        "Each client trains twice a round, so that `local_epochs` counts double; the mean is "
        "weighted by samples. Inner and outer rate are one argument (clientperavg.py:14).",
        partial(run, common.by_samples(PerFedAvg), local_epochs=2, **META),
    ),
    Case(
        "FedRep",
        "FedRep",
        "clients/clientrep.py:24",
        ("v",),
        partial(run, FedRep, head_epochs=HEAD_EPOCHS),
    ),
    Case("FedPer", "FedPer", "clients/clientper.py:10", ("v",), partial(run, FedPer)),
    Case("LGFedAvg", "LG", "clients/clientlg.py:10", ("v",), partial(run, LGFedAvg)),
    Case("FedBABU, training", "FedBABU", "clients/clientbabu.py:16", ("w",), partial(run, FedBABU)),
    Case(
        "FedBABU, start of fine-tuning",
        "FedBABU, fine-tuned",
        "servers/serverbabu.py:61",
        ("start",),
        lambda: {"start": run(pfllib.GlobalStart)["v"][-1:]},
        "Fine-tuning begins at the model that each client has at that moment: its own after its "
        "last local steps or, for clients outside the last cohort, the mean before the last. The "
        "last mean is never sent.",
        lambda: {"start": run(pfllib.OwnBodyFedBABU)["v"][-1:]},
    ),
    Case(
        "pFedMe",
        "pFedMe",
        "clients/clientpFedMe.py:56-68, optimizers/fedoptimizer.py:45-47",
        ("w", "v"),
        partial(run, pFedMe, **MOREAU),
        "θ_i starts where the last local step left it instead of at w_i, its gradient has 0.001 "
        "θ_i more (45), and the mean is weighted by samples. The stored θ_i are the parameters of "
        "the client's network themselves (47), which the received model overwrites before it is "
        "scored, so that what is called personalized is w.",
        partial(run, common.CarriedpFedMe, **MOREAU),
    ),
    Case(
        "pFedMe, β by default",
        "pFedMe, defaults",
        "main.py:446, servers/serverpFedMe.py:91",
        ("w",),
        partial(run, pFedMe, **MOREAU | dict(server_mixture=1.0)),
        "β is 0 unless `-bt` is given, and w keeps its first value in all rounds. The row above "
        "has β = 0.8.",
        lambda: {"w": np.tile(arrays()[2], (ROUNDS, 1))},
    ),
    Case(
        "FedAMP",
        "FedAMP",
        "clients/clientamp.py:40-42",
        ("v",),
        partial(run, FedAMP, alpha=1.0, sigma=5.0, penalty=1.0, alpha_decay=1.0),
        "The proximal term is made of `.data`, so it has no gradient (40), and local steps begin "
        "at the client's own model: u_i is computed and used by nothing. Every client trains "
        "alone, as in our LocalTrain.",
        partial(run, LocalTrain),
    ),
    Case(
        "FedGH",
        "FedGH",
        "servers/servergh.py:27",
        ("v",),
        partial(run, FedGH, **HEAD),
        "The server's head is the same object as the head of client 0, whose local steps move it "
        "in every round that has client 0. One pass of the server over the class means a round.",
        partial(run, pfllib.AliasedFedGH, **HEAD),
    ),
    Case(
        "MOON",
        "MOON",
        "clients/clientmoon.py:42-46",
        ("w",),
        partial(run, MOON, temperature=0.5, contrast=2.0),
    ),
    Case(
        "FedAS, full batches",
        "FedAS",
        "clients/clientas.py:46-63, 151-182",
        ("v",),
        partial(run, FedAS, batch_size=None),
    ),
    Case(
        "FedALA, full batches, all clients in every round",
        "FedALA",
        "utils/ALA.py:104-156",
        ("w",),
        partial(run, FedALA, cohorts=ALL, **MIXED),
    ),
    Case(
        "FedALA, full batches",
        "FedALA, cohorts",
        "servers/serverala.py:69-73",
        ("w",),
        partial(run, FedALA, **MIXED),
        "Clients outside of the cohort mix their models with the new one and learn weights, too, "
        "in every round.",
        partial(run, pfllib.EveryoneMixes, cohorts=ALL, **MIXED),
    ),
    Case(
        "FedRoD",
        "FedRoD",
        "clients/clientrod.py:16",
        ("w", "client head"),
        partial(run, FedRoD),
        "The personal head begins as a copy of the first head instead of at 0; the generic model "
        "agrees.",
        partial(run, pfllib.CopiedHeadFedRoD),
    ),
    Case(
        "FedNTD",
        "FedNTD",
        "servers/serverntd.py:69-71, clients/clientntd.py:79",
        ("w",),
        partial(run, FedNTD, distillation=0.7, temperature=2.0),
        "The mean is not weighted, and the divergence is times τ².",
        partial(run, FedNTD, distillation=0.7 * 4, temperature=2.0, weighting="uniform"),
    ),
    Case(
        "FedLC, full batches",
        "FedLC",
        "servers/serverlc.py:20-26",
        ("w",),
        partial(run, FedLC, calibration=0.8, batch_size=None),
        "n_i,c counts the samples of all clients together, so that all clients have the same "
        "margins, in single precision.",
        partial(run, pfllib.PooledFedLC, calibration=0.8, batch_size=None),
    ),
    Case(
        "FedDBE",
        "FedDBE",
        "servers/serverdbe.py:16-35",
        ("w",),
        partial(run, FedDBE, **DOMAIN),
        "All clients train once before the first round. Their models are thrown away, and the mean "
        "of their features is known from the first round on.",
        known_mean,
    ),
    Case(
        "FedProto",
        "FedProto",
        "clients/clientproto.py:57-60, servers/serverproto.py:101-117",
        ("v",),
        partial(run, FedProto, penalty=1.5),
        "The class means are those of the features in the local steps, while the model moves. They "
        "are averaged over clients instead of samples, and a class that the last cohort lacks has "
        "none.",
        partial(run, pfllib.RunningFedProto, penalty=1.5),
    ),
    Case(
        "FedDistill (FD)",
        "FD",
        "clients/clientfd.py:44-54, servers/serverfd.py:84-100",
        ("v",),
        partial(run, FedDistill, penalty=0.6),
        "Scores before the softmax are averaged, during the local steps, and taken for "
        "probabilities in the cross entropy. A client is among its own teachers, only the last "
        "cohort teaches, and where no one has the class a model's own scores are the target.",
        partial(run, pfllib.ScoresFedDistill, penalty=0.6),
    ),
    Case(
        "FML",
        "FML",
        "clients/clientfml.py:46-56, servers/serverfml.py:84-94",
        ("client u", "m"),
        lambda: with_messenger(FML, network(), **MUTUAL),
        "Each network descends on both losses, as no probabilities are held; the divergence is a "
        "mean over classes, too; messengers have equal weights.",
        lambda: with_messenger(pfllib.SummedFML, network(), **MUTUAL),
    ),
    Case(
        "FedKD, four classes of which one is empty",
        "FedKD",
        "clients/clientkd.py:56-79, 137-166, servers/serverkd.py:122-167",
        ("client u", "client W", "m"),
        lambda: with_messenger(FedKD, wider(), **DISTILLED),
        "Each network descends on both losses, in which nothing is held; the denominators are of "
        "the mini-batch. Low rank have the messengers and again their mean, with equal weights, "
        "not the changes; a matrix that needs all singular values becomes 0 (151). The first "
        "round's energy counts twice. Parameters with three rows break it (119).",
        lambda: with_messenger(pfllib.SummedFedKD, wider(), **DISTILLED),
    ),
    Case(
        "GPFL",
        "GPFL",
        "clients/clientgpfl.py:69-77, 97-107",
        ("φ, h", "valve", "vectors"),
        lambda: of_valves(pfllib.at_start(GPFL, "valve.*", "vectors")),
        "The conditions are 0 in the first round and later those of the vectors that a client had "
        "before it received their mean. The norm in the third term is over all samples of a "
        "mini-batch.",
        lambda: of_valves(pfllib.OldConditionsGPFL),
    ),
    Case(
        "FedCP, all clients in every round, without noise, first v_i of the head",
        "FedCP",
        "clients/clientcp.py:116-141, servers/servercp.py:170-180",
        ("body", "head", "policy", "client h"),
        lambda: of_policies(pfllib.at_start(FedCP, "policy.*"), cohorts=ALL),
    ),
    Case(
        "FedCP, without noise, first v_i of the head",
        "FedCP, cohorts",
        "servers/servercp.py:137-157",
        ("body", "head", "policy", "client h"),
        lambda: of_policies(pfllib.at_start(FedCP, "policy.*")),
        "The policy and the common head reach the clients of the round at its end, and not the "
        "others.",
        lambda: of_policies(pfllib.CohortsFedCP),
    ),
    Case(
        "FedFomo, two models, judged on training samples",
        "FedFomo",
        "clients/clientfomo.py:98-169, servers/serverfomo.py:66-82",
        ("v",),
        partial(run, FedFomo, **JUDGED),
        "The own model is one of the M; models of clients that never took part are sent, too. A "
        "client keeps w_i where no model lowers its loss; distances have 0.00001 more.",
        partial(run, pfllib.OwnAmongFedFomo, **JUDGED),
    ),
    Case(
        "APPLE, all clients in every round",
        "APPLE",
        "clients/clientapple.py:19-67",
        ("v", "p"),
        lambda: of_vectors(APPLE),
        "p_i begins as 1/N (23), η is times N (19), slopes of p are means over values and layers "
        "(52) after the step of c_i. The restoring of c_i (65) copies it to itself, so that "
        "clients see what those before them did in the same round; then w_i before its last step "
        "replaces c_i (67). λ is late by a round.",
        lambda: of_vectors(pfllib.InTurnAPPLE),
    ),
    Case(
        "FedGen, the same draws on both sides",
        "FedGen",
        "clients/clientgen.py:56-60, servers/servergen.py:26-49, 144-172, 209-226",
        ("w",),
        lambda: fedgen.drawn_alike(fedgen.GivenGenerator, partial(run, FedGen, **FEATURES_MADE)),
        "BatchNorm follows the generator's hidden layer, with the statistics of a step's features. "
        "Labels have the distribution of all clients' samples, and features are used, from the "
        "first round on. Adam lasts over the rounds.",
        lambda: fedgen.drawn_alike(
            fedgen.NormalizedGenerator, partial(run, fedgen.LastingFedGen, **FEATURES_MADE)
        ),
    ),
]
