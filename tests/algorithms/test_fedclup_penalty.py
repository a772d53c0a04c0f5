"""How FedCLUP chooses λ, and changes it: Corollary 1, the plateau rule, the released rule."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet, SplitOwn
from models import MLP, HalfSquaredError
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedCLUP
from pfl.callbacks import RoundCheckpoint
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.reference_clup_pd import Stop, assert_rounds
from tests.commands import table
from tests.problems import History, Problem, least_squares, owned, quiet, scalar_problem
from tests.refusal import refused

FULL = dict(batch_size=None, loss=HalfSquaredError())
START = np.linspace(-1.0, 1.0, 8)


def metrics(root):
    return table(root / "run" / "metrics.csv")


# ---- Corollary 1 --------------------------------------------------------------------------------


def corollary_1(smooth, convex, r, rho, n, total):
    """R <= n^-1/2: the lower bound on λ; else the upper one."""
    if r > n**-0.5:
        return rho**2 / (n * convex * r**2)
    kappa = smooth / convex
    curved = 64 * kappa**2 * smooth
    shared = 2 * smooth**2 * r**2 + rho**2 / n
    pooled = smooth**2 * r**2 + rho**2 / total
    return max(curved, max(2 * kappa, 5) * convex * shared / pooled) - convex


# m clients, n = 4 samples each in the mean, N = 4 m in all, so n^-1/2 = 1/2.
CASES = {
    # 64 κ² L = 512 against 5 (0.02·4 + 1) / (0.01·4 + 0.25) = 19.
    "curvature": (4, dict(smoothness=2.0, strong_convexity=1.0, heterogeneity=0.1)),
    # 64 against 5 (0.02 + 1) / (0.01 + 1/16) = 70.
    "sharing": (16, dict(smoothness=1.0, strong_convexity=1.0, heterogeneity=0.1)),
    # 64·2.6²·1.3 = 562 against 5.2·0.5 (2·1.69e-4 + 1) / (1.69e-4 + 1/300) = 743.
    "sharing, 2κ > 5": (300, dict(smoothness=1.3, strong_convexity=0.5, heterogeneity=0.01)),
    "boundary": (4, dict(smoothness=2.0, strong_convexity=1.0, heterogeneity=0.5)),
    # ρ² / (n μ R²) = 4 / (4·0.7·9).
    "different clients": (4, dict(smoothness=2.0, strong_convexity=0.7, heterogeneity=3.0)),
    "other noise": (4, dict(smoothness=2.0, strong_convexity=0.7, heterogeneity=0.6, noise=0.5)),
}


@pytest.mark.parametrize("source", ["arguments", "datamodule"])
@pytest.mark.parametrize("case", CASES)
def test_the_penalty_of_corollary_1(watch, case, source):
    m, known = CASES[case]
    # 2 or 6 samples each: n is the mean number, N the sum.
    problem, given = scalar_problem(np.arange(float(m)), copies=[1, 3] * (m // 2)), known
    if source == "datamodule":
        given = {name: value for name, value in known.items() if name == "noise"}
        for name in known.keys() - given.keys():
            setattr(problem.datamodule, name, known[name])
    arguments = dict(penalty="corollary1", local_step="corollary2", local_steps=1)
    algorithm = FedCLUP(problem.network(0.0), **arguments, **given, **FULL)
    models = watch(algorithm, problem, 2)
    expected = corollary_1(
        known["smoothness"],
        known["strong_convexity"],
        known["heterogeneity"],
        known.get("noise", 2.0),
        4,
        4 * m,
    )
    np.testing.assert_allclose(models["lam"], [expected] * 2, rtol=1e-6)
    assert algorithm.personalization_penalty == pytest.approx(expected, rel=1e-6)
    rate = 1 / (expected + known["smoothness"])
    assert algorithm.learning_rate(1) == pytest.approx(rate, rel=1e-6)
    # It is the penalty that the clients use: η = 1 / (λ + L), f_i = (w - A_i)² / 2, from w = 0.
    first = problem.size * np.arange(m) / (expected + known["smoothness"])
    np.testing.assert_allclose(models["w_i"][0, :, 0], first, rtol=1e-5)


def test_arguments_override_the_constants_of_the_data_module(fit):
    problem = scalar_problem([0.0, 1.0], copies=2)
    problem.datamodule.smoothness, problem.datamodule.strong_convexity = 2.0, 1.0
    arguments = dict(penalty="corollary1", local_step="corollary2", strong_convexity=0.5)
    algorithm = FedCLUP(problem.network(0.0), heterogeneity=2.0, **arguments, **FULL)
    fit(algorithm, problem, 1)
    assert float(algorithm.lam) == pytest.approx(corollary_1(2.0, 0.5, 2.0, 2.0, 4, 8), rel=1e-6)


@pytest.mark.parametrize("step", ["corollary2", "inverse_smoothness"])
def test_a_server_step_by_the_smoothness_needs_it(fit, step):
    problem = scalar_problem([0.0, 1.0])
    with refused(f"model.smoothness: null, but server_step: {step} needs a number"):
        fit(FedCLUP(problem.network(0.0), server_step=step, **FULL), problem, 1)


KNOWN = dict(smoothness=2.0, strong_convexity=1.0, heterogeneity=0.1)


@pytest.mark.parametrize("missing", KNOWN)
def test_corollary_1_needs_its_constants(fit, missing):
    problem = scalar_problem([0.0, 1.0])
    known = {name: value for name, value in KNOWN.items() if name != missing}
    with refused("corollary1", missing):
        fit(FedCLUP(problem.network(0.0), penalty="corollary1", **known, **FULL), problem, 1)


def test_corollary_1_respects_the_limit_and_takes_equal_clients(fit):
    problem = scalar_problem([0.0, 1.0])
    settings = {**KNOWN, "heterogeneity": 0.0, **FULL}
    with refused("model.max_penalty: 0.001", "at least the first penalty"):
        kind = dict(penalty="corollary1", max_penalty=1e-3)
        fit(FedCLUP(problem.network(0.0), **kind, **settings), problem, 1)


def test_corollary_1_needs_strong_convexity(fit):
    """κ = L / μ: an objective that is convex only, as the data may know it, has none."""
    problem = scalar_problem([0.0, 1.0])
    problem.datamodule.smoothness, problem.datamodule.strong_convexity = 2.0, 0.0
    with refused("strong_convexity"):
        algorithm = FedCLUP(problem.network(0.0), penalty="corollary1", heterogeneity=0.1, **FULL)
        fit(algorithm, problem, 1)


@pytest.mark.parametrize(
    "rule",
    [
        dict(server_step="corollary2"),
        dict(server_step="inverse_smoothness"),
        dict(local_step="corollary2"),
    ],
    ids=str,
)
def test_steps_that_need_the_smoothness_say_so(fit, rule):
    problem = scalar_problem([0.0, 1.0])
    with refused("smoothness"):
        fit(FedCLUP(problem.network(0.0), **rule, **FULL), problem, 1)


# ---- the plateau rule ---------------------------------------------------------------------------

EVERYONE, SMOOTH = range(4), 4.0
PLATEAU = dict(growth=3.0, patience=3, tolerance=0.04)


def with_validation():
    """A problem whose clients keep a quarter for validation; and their validation samples."""
    whole = least_squares((40, 28, 36, 32), bias=True, seed=8)
    dm = owned(
        np.repeat(np.arange(4), whole.sizes),
        torch.from_numpy(np.concatenate(whole.features)),
        torch.from_numpy(np.concatenate(whole.targets)),
        protocol=SplitOwn(test=0.0, validation=0.25),
    )
    x, y = np.concatenate(whole.features), np.concatenate(whole.targets)
    train, val = ([part[i] for i in range(4)] for part in (dm.partition.train, dm.partition.val))
    assert all(len(rows) > 5 for rows in [*train, *val])
    problem = Problem([x[k] for k in train], [y[k] for k in train], whole.make, bias=True)
    problem.datamodule = dm
    return problem, [(x[k], y[k]) for k in val]


def validation_loss(w_i, samples):
    """The unweighted mean over clients of their own models' mean loss; w = (weights, biases)."""
    losses = []
    for w, (x, y) in zip(w_i, samples, strict=True):
        residual = x @ w[:6].reshape(2, 3).T + w[6:] - y
        losses.append(0.5 * (residual**2).sum(1).mean())
    return np.mean(losses)


def plateau(problem, samples, rounds, penalty, ceiling, *, growth, patience, tolerance):
    """Every `patience` rounds λ <- min(growth λ, ceiling) where the loss fell by less than a share
    `tolerance` since the last such round; λ of each round, the losses, and the iterates.

    η = 1 / (λ + L) and γ = 1 / L_g, so γλ = (λ + L) / L, follow. Slow but obvious: all rounds so
    far are run again for each new one.
    """
    used, losses = [penalty], []
    for t in range(rounds):
        history = reference.fedclup(
            problem,
            START,
            [EVERYONE] * (t + 1),
            lam=lambda r: used[r],
            lr=lambda r: 1 / (used[r] + SMOOTH),
            move=lambda r: (used[r] + SMOOTH) / SMOOTH,
            steps=1,
        )
        losses.append(validation_loss(history[-1]["w_i"], samples))
        following = used[-1]
        if (t + 1) % patience == 0 and t + 1 > patience:
            old, new = losses[t - patience], losses[t]
            if (old - new) / old < tolerance:
                following = min(growth * following, ceiling)
        used.append(following)
    return used, losses, history


@pytest.mark.parametrize("max_penalty", [None, 0.7])
def test_the_penalty_grows_where_validation_stalls(watch, tmp_path, max_penalty):
    problem, samples = with_validation()
    rounds, penalty = 24, 0.05
    algorithm = FedCLUP(
        problem.network(START),
        penalty=penalty,
        penalty_schedule="plateau",
        max_penalty=max_penalty,
        server_step="inverse_smoothness",
        local_step="corollary2",
        smoothness=SMOOTH,
        local_steps=1,
        **PLATEAU,
        **FULL,
    )
    models = watch(algorithm, problem, rounds)
    ceiling = max_penalty or np.inf
    used, losses, expected = plateau(problem, samples, rounds, penalty, ceiling, **PLATEAU)
    actual = [float(row["val/personalized/loss"]) for row in metrics(tmp_path)]
    np.testing.assert_allclose(actual, losses, rtol=1e-9)
    assert_rounds(models.rounds, expected, "w", "w_i")
    # The case is a good one: λ stays at some checks and grows at others, three times or more.
    grown = [b > a for a, b in pairwise(used)]
    checks = grown[2 * PLATEAU["patience"] - 1 :: PLATEAU["patience"]]
    assert sum(grown) >= 3 and not all(checks) and grown[5] is False
    assert max(used) == pytest.approx(0.7 if max_penalty else penalty * 3 ** sum(grown))
    assert algorithm.personalization_penalty == pytest.approx(used[rounds], rel=1e-6)


@pytest.mark.parametrize("loss", [0.1, 0.7])  # float32 rounds 0.1 up, and 0.7 down
def test_equal_losses_leave_the_penalty_of_a_rule_without_tolerance(loss):
    """A share of 0 less is not below a tolerance of 0; any loss that is larger is."""
    network = scalar_problem([0.0]).network(0.0)
    arguments = dict(penalty_schedule="plateau", patience=1, tolerance=0.0, growth=2.0)
    algorithm = FedCLUP(network, penalty=0.5, **arguments)
    for following, expected in [(loss, 0.5), (loss, 0.5), (np.nextafter(loss, 1.0), 1.0)]:
        algorithm.progress.go_on_from(algorithm.rounds + 1)
        algorithm.after_evaluation({"val/personalized/loss": following})
        assert algorithm.personalization_penalty == expected


def test_the_plateau_rule_needs_validation_samples(fit):
    problem = scalar_problem([0.0, 1.0])
    with refused("penalty_schedule", "validation"):
        fit(FedCLUP(problem.network(0.0), penalty_schedule="plateau", **FULL), problem, 1)


def test_the_plateau_rule_needs_validation(fit):
    """Samples are not enough: they must be looked at during training."""
    problem, _ = with_validation()
    algorithm = FedCLUP(problem.network(0.0), penalty_schedule="plateau", patience=1, **FULL)
    with refused("evaluate"):
        fit(algorithm, problem, 3, evaluate=("test",))


def test_the_plateau_rule_needs_a_trainer_that_validates(fit, tmp_path):
    problem, _ = with_validation()
    trainer = Trainer(limit_val_batches=0, default_root_dir=tmp_path, accelerator="cpu")
    algorithm = FedCLUP(problem.network(0.0).float(), penalty_schedule="plateau", **FULL)
    with refused("limit_val_batches", "plateau"):
        trainer.fit(algorithm, datamodule=FederatedLoop(problem.datamodule))


# ---- the released rule --------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [[[0, 1, 2, 3]] * 8, [[0, 1], [2], [1, 3], [0], [1, 2]] * 2])
@pytest.mark.parametrize(
    ("scale", "far"),
    [(3.0, True), (0.52, True), (0.01, False)],  # 0.52: R < 1, so that n and the sum differ in n R²
    ids=["different clients", "less different clients", "similar clients"],
)
@pytest.mark.parametrize("server_step", ["inverse_penalty", "inverse_smoothness"])
def test_the_released_rule(watch, trace, scale, far, server_step):
    """After T/2 of T rounds, once: with R = mean |w_i - w| over all clients and n samples a client,
    λ = 5 / (n R²) if R >= n^-1/2, else 5 / (sqrt(n) R)."""
    problem, rounds, start = scalar_problem(scale * np.arange(4.0), copies=[2, 4, 3, 7]), 8, 0.5
    smooth, before, n = 2.0, 0.4, 8.0
    start = np.array([scale * 0.5])
    algorithm = FedCLUP(
        problem.network(start),
        penalty=before,
        penalty_schedule="authors_code",
        server_step=server_step,
        local_step="corollary2",
        smoothness=smooth,
        local_steps=3,
        **FULL,
    )
    models = watch(algorithm, problem, rounds, trace=trace)
    half = models.rounds[rounds // 2 - 1]
    spread = np.linalg.norm(half["w_i"] - half["w"], axis=1).mean()
    after = 5 / (n * spread**2) if far else 5 / (np.sqrt(n) * spread)
    assert (spread >= n**-0.5) == far and abs(np.log(after / before)) > 0.3

    def lam(t):
        return before if t < rounds // 2 else after

    expected = reference.fedclup(
        problem,
        start,
        trace[:rounds],
        lam=lam,
        lr=lambda t: 1 / (lam(t) + smooth),
        move=1.0 if server_step == "inverse_penalty" else lambda t: (lam(t) + smooth) / smooth,
        steps=3,
    )
    assert_rounds(models.rounds, expected, "w", "w_i", atol=1e-10 * max(1.0, scale))
    np.testing.assert_allclose(float(algorithm.lam), after, rtol=1e-6)
    # One value of 8 bytes a visit: the server keeps what it gets anyway.
    assert algorithm.progress.bytes_up == 8 * sum(map(len, trace[:rounds]))


# ---- resume -------------------------------------------------------------------------------------

SCHEDULES = {
    "plateau": dict(penalty_schedule="plateau", patience=2, tolerance=0.05, growth=1.5),
    "hasty": dict(penalty_schedule="plateau", patience=1, tolerance=10.0, growth=1.5),
    "authors_code": dict(penalty_schedule="authors_code"),
}


def train(root, schedule, *callbacks, start=0, ckpt_path=None, max_epochs=8, **trainer):
    """8 rounds of new objects, whose network begins at random (`start` is the seed)."""
    torch.manual_seed(start)
    algorithm = FedCLUP(MLP(64, (8,)), penalty=0.1, local_steps=2, **SCHEDULES[schedule])
    models = History()
    trainer = quiet(
        root, max_epochs, RoundCheckpoint(every_seconds=0), models, *callbacks, **trainer
    )
    data = FederatedLoop(DigitsDataModule(6, Dirichlet(1.0)), clients_per_round=3)
    trainer.fit(algorithm, datamodule=data, ckpt_path=ckpt_path)
    return algorithm, models


@pytest.mark.parametrize(
    ("schedule", "done"), [("plateau", 3), ("plateau", 4), ("authors_code", 4)]
)
def test_a_resumed_run_has_the_same_penalties(tmp_path, schedule, done):
    """Broken off at a check of the plateau rule or between two, or just before the released one."""
    expected, whole = train(tmp_path / "straight", schedule)
    train(tmp_path / "parts", schedule, Stop(done))
    last = tmp_path / "parts" / "run" / "checkpoints" / "last.ckpt"
    assert len(metrics(tmp_path / "parts")) == done
    actual, rest = train(tmp_path / "parts", schedule, start=1, ckpt_path=last)
    for name in ("w", "w_i", "lam"):
        np.testing.assert_array_equal(rest[name], whole[name][done:], err_msg=name)
    assert torch.equal(actual.lam, expected.lam) and float(actual.lam) != pytest.approx(0.1)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "straight")


def test_a_resumed_run_takes_a_new_penalty(tmp_path):
    """w_i <- w_i - η (w_i - A_i + λ (w_i - w)) with λ = 0.5 in round 1 and 2 in round 2."""
    problem = scalar_problem([1.0, 3.0])
    given = dict(lr=0.1, batch_size=None, local_steps=1, loss=HalfSquaredError())
    w_i = np.full(2, 5.0)
    w = 5.0
    last = None
    for rounds, penalty in ((1, 0.5), (2, 2.0)):
        algorithm = FedCLUP(problem.network(5.0), penalty=penalty, **given)
        trainer = quiet(tmp_path, rounds, RoundCheckpoint(every_seconds=0), limit_val_batches=0)
        loop = FederatedLoop(problem.datamodule, evaluate=())
        with nullcontext() if last is None else pytest.warns(match="penalty was 0.5 and is 2.0"):
            trainer.fit(algorithm, datamodule=loop, ckpt_path=last)
        last = trainer.run_dir / "checkpoints" / "last.ckpt"
        w_i = w_i - 0.1 * (w_i - [1.0, 3.0] + penalty * (w_i - w))
        w = w_i.mean()
    assert float(algorithm.global_model) == pytest.approx(w, abs=1e-12)
    own = algorithm.client_rows("w", np.arange(2))[:, 0]
    np.testing.assert_allclose(own, w_i, rtol=0, atol=1e-12)


def test_a_run_that_ends_between_two_evaluations_continues_as_one_run(tmp_path):
    """Every second round is evaluated, and the last: of a run of three the third too. The plateau
    rule, which would look at it, does not; of eight rounds it looks at 2, 4, 6 and 8 only."""
    often = {"check_val_every_n_epoch": 2}
    _, whole = train(tmp_path / "straight", "hasty", **often)
    _, first = train(tmp_path / "parts", "hasty", max_epochs=3, **often)
    last = tmp_path / "parts" / "run" / "checkpoints" / "last.ckpt"
    _, rest = train(tmp_path / "parts", "hasty", start=1, ckpt_path=last, **often)
    # Below a tolerance of 10 every loss stalls: λ grows 0.1 * 1.5^k from the second look on.
    np.testing.assert_allclose(whole["lam"], 0.1 * 1.5 ** np.array([0, 0, 0, 1, 1, 2, 2, 3]))
    np.testing.assert_array_equal([*first["lam"], *rest["lam"]], whole["lam"])
    np.testing.assert_array_equal(rest["w"], whole["w"][3:])
