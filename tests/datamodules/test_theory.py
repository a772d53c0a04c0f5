"""Synthetic problems: the samples of all problems, and the two logistic problems in detail."""

import math

import numpy as np
import pytest
import torch

from datamodules import AgentLogistic, HeterogeneousLogistic, LeastSquares
from models import PenalizedCrossEntropy, PenalizedLogisticRegression

DRAWN = {
    "argmax": (HeterogeneousLogistic, {"features": 3, "samples_per_client": 8}),
    "sampled": (HeterogeneousLogistic, {"features": 3, "labels": "sampled", "classes": 3}),
    "least squares": (LeastSquares, {"features": 3}),
    "weak": (AgentLogistic, {"features": 3}),
    "strong": (AgentLogistic, {"features": 3, "non_iid": "strong"}),
}


def client(dm, k):
    """Returns the training samples of client `k` as arrays."""
    x, y = dm.samples.gather(torch.from_numpy(dm.partition.train[k]))
    return x.numpy(), y.numpy()


def softmax(scores):
    share = np.exp(scores - scores.max(-1, keepdims=True))
    return share / share.sum(-1, keepdims=True)


# ---- all problems -------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "kwargs"), DRAWN.values(), ids=DRAWN)
def test_samples_of_a_client_do_not_depend_on_the_number_of_clients(make, kwargs):
    few, many = make(2, seed=5, **kwargs), make(4, seed=5, **kwargs)
    for k in range(2):
        for actual, expected in zip(client(few, k), client(many, k), strict=True):
            np.testing.assert_array_equal(actual, expected)
    if few.true_models is not None:
        assert torch.equal(few.true_models, many.true_models[:2])
    # Other clients and other seeds give other samples.
    assert not np.array_equal(client(many, 0)[0], client(many, 1)[0])
    assert not np.array_equal(client(few, 0)[0], client(make(2, seed=6, **kwargs), 0)[0])


@pytest.mark.parametrize(("make", "kwargs"), DRAWN.values(), ids=DRAWN)
def test_arrays_are_float64_in_the_order_in_which_clients_draw(make, kwargs):
    dm = make(3, **kwargs)
    inputs, targets = dm.train_arrays()
    assert inputs.dtype == np.float64
    assert targets.dtype == (np.float64 if make is LeastSquares else np.int64)
    for k in range(3):
        for actual, expected in zip((inputs[k], targets[k]), client(dm, k), strict=True):
            np.testing.assert_array_equal(actual, expected)
        for actual, expected in zip(client(dm, k), dm.draw(k), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_defaults_are_those_of_the_papers():
    dm = HeterogeneousLogistic()
    assert (dm.num_clients, dm.features, dm.classes, dm.labels) == (10, 10, 2, "argmax")
    assert (dm.client_sizes == 200).all()
    dm = AgentLogistic()
    assert (dm.num_clients, dm.input_shape) == (100, (20,))
    assert (dm.client_sizes == 400).all()


@pytest.mark.parametrize(
    ("make", "kwargs", "parts"),
    [
        (HeterogeneousLogistic, {"classes": 1}, ["classes: 1", "at least 2"]),
        (HeterogeneousLogistic, {"labels": "max"}, ["labels: 'max'", "argmax or sampled"]),
        (HeterogeneousLogistic, {"heterogeneity": -1.0}, ["heterogeneity: -1.0", "at least 0"]),
        (HeterogeneousLogistic, {"test_samples": -1}, ["test_samples: -1", "at least 0"]),
        (HeterogeneousLogistic, {"num_clients": 0}, ["num_clients: 0", "at least 1"]),
        (LeastSquares, {"samples_per_client": 9}, ["samples_per_client: 9", "at least 10"]),
        (LeastSquares, {"condition": 0.5}, ["condition: 0.5", "at least 1"]),
        (LeastSquares, {"condition": math.nan}, ["condition: nan", "at least 1"]),
        (LeastSquares, {"features": 1}, ["condition: 10.0", "must be 1", "features=1"]),
        (AgentLogistic, {"non_iid": "none"}, ["non_iid: 'none'", "weak or strong"]),
        (AgentLogistic, {"features": 2.0}, ["features: 2.0", "whole number"]),
        (AgentLogistic, {"beta": -0.1}, ["beta: -0.1", "at least 0"]),
    ],
)
def test_wrong_arguments_are_refused(one_line, make, kwargs, parts):
    with one_line(f"{make.__name__}.{parts[0]}; it must be", *parts[1:]):
        make(**kwargs)


@pytest.mark.parametrize("penalty", [-1.0, math.nan])
@pytest.mark.parametrize("make", [HeterogeneousLogistic, LeastSquares])
def test_a_penalty_below_zero_is_refused(one_line, make, penalty):
    with one_line(f"solve.penalty: {penalty}; it must be at least 0"):
        make(2).solve(penalty)


# ---- HeterogeneousLogistic ----------------------------------------------------------------------


def test_features_of_a_client_have_the_stated_covariance():
    """Standard errors of n draws: of a variance s^2 (2/n)^1/2, of a covariance s_i s_j / n^1/2."""
    n, d = 40_000, 4
    x = client(HeterogeneousLogistic(1, n, d), 0)[0]
    deviations = np.arange(1, d + 1) ** -0.6
    error = np.abs(np.cov(x.T) - np.diag(deviations**2))
    assert (error <= 5 * np.sqrt(2 / n) * np.outer(deviations, deviations)).all()


def test_feature_means_and_true_models_have_the_stated_spread():
    m, n, d = 3000, 50, 3
    dm = HeterogeneousLogistic(m, n, d, heterogeneity=2.5)
    means = dm.train_arrays()[0].mean(1)
    variance = 1 + np.arange(1, d + 1) ** -1.2 / n  # of v_k and of the mean of n samples around it
    assert (np.abs(means.mean(0)) <= 5 * np.sqrt(variance / m)).all()
    assert (np.abs(means.var(0) / variance - 1) <= 5 * np.sqrt(2 / m)).all()
    entries = dm.true_models.numpy()
    assert entries.shape == (m, 2 * d)
    assert abs(entries.mean()) <= 5 * 2.5 / np.sqrt(entries.size)
    assert abs(entries.std() / 2.5 - 1) <= 5 / np.sqrt(2 * entries.size)


@pytest.mark.parametrize("classes", [2, 4])
def test_argmax_labels_are_separated_by_the_true_model(classes):
    dm = HeterogeneousLogistic(6, 100, 5, classes)
    for k in range(6):
        x, y = client(dm, k)
        scores = x @ dm.true_models[k].view(classes, 5).numpy().T
        np.testing.assert_array_equal(y, scores.argmax(1))
        # A thousand times the true model has no loss left: there is no finite best model.
        likelihood = softmax(1e6 * scores)[np.arange(100), y]
        assert likelihood.min() > 0.99
    assert dm.solve(0.0) is None
    # A single client is alone whatever the penalty.
    alone = HeterogeneousLogistic(1, 100, 5, classes)
    assert alone.solve(0.1) is None
    assert alone.solve(math.inf) is None


def test_argmax_labels_do_not_depend_on_heterogeneity():
    near, far = (HeterogeneousLogistic(3, heterogeneity=r) for r in (0.1, 10.0))
    torch.testing.assert_close(100 * near.true_models, far.true_models)
    for actual, expected in zip(near.train_arrays(), far.train_arrays(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_sampled_labels_have_the_probabilities_of_the_true_model():
    """The gradient at the true model is a mean of n draws with mean 0 and known covariance."""
    n, d, c = 40_000, 3, 3
    dm = HeterogeneousLogistic(1, n, d, c, heterogeneity=0.7, labels="sampled")
    x, y = client(dm, 0)
    p = softmax(x @ dm.true_models[0].view(c, d).numpy().T)
    terms = (p - np.eye(c)[y])[:, :, None] * x[:, None, :]
    variance = np.einsum("nc,nd->cd", p * (1 - p), x**2) / n
    assert (np.abs(terms.mean(0)) <= 5 * np.sqrt(variance / n)).all()
    assert (y != p.argmax(1)).mean() > 0.1


def test_more_samples_leave_the_first_samples_unchanged():
    kwargs = dict(num_clients=3, features=4, labels="sampled", seed=2)
    small = HeterogeneousLogistic(samples_per_client=7, **kwargs)
    large = HeterogeneousLogistic(
        samples_per_client=7, validation_samples=2, test_samples=5, **kwargs
    )
    longer = HeterogeneousLogistic(samples_per_client=14, **kwargs)
    for k in range(3):
        for actual, expected in zip(client(large, k), client(small, k), strict=True):
            np.testing.assert_array_equal(actual, expected)
        # The samples are drawn in the order training, validation, test.
        parts = large.partition
        order = np.concatenate([parts.train[k], parts.val[k], parts.test[k]])
        np.testing.assert_array_equal(order, np.arange(14 * k, 14 * (k + 1)))
        assert [len(p[k]) for p in (parts.train, parts.val, parts.test)] == [7, 2, 5]
        x, y = large.samples.gather(torch.from_numpy(order))
        for actual, expected in zip((x.numpy(), y.numpy()), client(longer, k), strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert "7 training, 2 validation and 5 test samples" in large.describe()
    assert repr(large.protocol) == "InOrder(validation=2, train=7, test=5)"


def cross_entropies(dm, models):
    """Returns f_i at models [M, P], by PyTorch's loss."""
    x, y = map(torch.from_numpy, dm.train_arrays())
    scores = torch.einsum("mnd,mcd->mnc", x, models.unflatten(1, (dm.classes, dm.features)))
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none")
    return losses.view(y.shape).mean(1)


@pytest.mark.parametrize("classes", [2, 3])
def test_smoothness_bounds_the_curvature_of_the_softmax_objective(classes):
    dm = HeterogeneousLogistic(4, 60, 3, classes)
    x = dm.train_arrays()[0]
    largest = [np.linalg.eigvalsh(x[k].T @ x[k] / 60)[-1] for k in range(4)]
    assert dm.smoothness == pytest.approx(max(largest) / 2)
    assert dm.strong_convexity is None

    def hessian(models):
        full = torch.autograd.functional.hessian(lambda w: cross_entropies(dm, w).sum(), models)
        return [torch.linalg.eigvalsh(full[k, :, k]) for k in range(4)]

    generator = torch.Generator().manual_seed(0)
    size = (4, classes * 3)
    models = torch.randn(size, generator=generator, dtype=torch.float64)
    curvatures = torch.stack(hessian(models))
    assert curvatures.max() <= dm.smoothness
    # Adding one vector of 3 numbers to every row changes nothing: 3 directions have no curvature.
    assert (curvatures[:, :3].abs() < 1e-12).all()
    assert (curvatures[:, 3] > 1e-6).all()
    if classes == 2:  # the bound is reached where both classes are equally likely
        at_zero = torch.stack(hessian(torch.zeros(size, dtype=torch.float64)))
        assert at_zero.max().item() == pytest.approx(dm.smoothness)


@pytest.mark.parametrize("penalty", [1e-6, 0.02, 0.5, 3.0, 1e4])
@pytest.mark.parametrize(("labels", "classes"), [("argmax", 2), ("sampled", 2), ("sampled", 3)])
def test_the_gradient_is_zero_at_the_solution_of_the_coupled_problem(labels, classes, penalty):
    dm = HeterogeneousLogistic(6, 80, 4, classes, labels=labels)
    w, own = dm.solve(penalty)
    assert (w.shape, own.shape, w.dtype) == ((4 * classes,), (6, 4 * classes), torch.float64)
    w.requires_grad_()
    own.requires_grad_()
    ties = penalty / 2 * (own - w).square().sum(1)
    (cross_entropies(dm, own) + ties).mean().backward()
    assert own.grad.abs().max() < 1e-12 * max(1, penalty)
    assert w.grad.abs().max() < 1e-12 * max(1, penalty)
    # Of all solutions, this is the one whose rows add up to zero.
    for models in (w, own):
        rows = models.detach().unflatten(-1, (classes, 4))
        assert rows.sum(-2).abs().max() < 1e-12 * (1 + rows.abs().max())
        torch.testing.assert_close(dm.identified(models), models)


@pytest.mark.parametrize("labels", ["argmax", "sampled"])
def test_the_gradient_is_zero_at_the_solution_for_one_model(labels):
    dm = HeterogeneousLogistic(6, 80, 4, labels=labels)
    w, own = dm.solve(math.inf)
    assert torch.equal(own, w.expand(6, -1))
    w.requires_grad_()
    cross_entropies(dm, w.expand(6, -1)).mean().backward()
    assert w.grad.abs().max() < 1e-14
    # The distance of the coupled solution from it falls with 1/λ.
    errors = [(dm.solve(penalty)[0] - w).norm().item() for penalty in (1e2, 1e3, 1e4)]
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 10, rtol=0.05)


def test_clients_alone_approach_their_true_models_with_more_samples():
    """Maximum likelihood: errors fall with n^-1/2, so by 3 from n to 9 n."""
    errors = []
    for n in (400, 3600):
        dm = HeterogeneousLogistic(30, n, 2, 3, heterogeneity=0.2, labels="sampled")
        w, own = dm.solve(0.0)
        torch.testing.assert_close(w, own.mean(0))
        errors.append((own - dm.identified(dm.true_models)).square().mean().sqrt())
        own.requires_grad_()
        cross_entropies(dm, own).sum().backward()
        assert own.grad.abs().max() < 1e-14
    # 30 clients with 4 free numbers each: a root mean square is known to 1 / (2 120)^1/2 = 6 %.
    assert errors[0] / errors[1] == pytest.approx(3, rel=0.3)


def test_identified_models_have_rows_of_mean_zero():
    dm = HeterogeneousLogistic(2, features=2, classes=3)
    models = torch.arange(6.0)  # rows (0, 1), (2, 3), (4, 5), whose mean is (2, 3)
    assert dm.identified(models).tolist() == [-2, -2, 0, 0, 2, 2]
    truth = dm.identified(dm.true_models).numpy()
    shifted = dm.true_models + torch.tensor([1.0, 2.0] * 3)
    np.testing.assert_allclose(dm.identified(shifted).numpy(), truth, atol=1e-12)
    radius = np.linalg.norm(truth - truth.mean(0), axis=1).max()
    assert dm.heterogeneity == pytest.approx(radius)


# ---- AgentLogistic ------------------------------------------------------------------------------


@pytest.mark.parametrize("non_iid", ["weak", "strong"])
def test_features_of_agents_are_standard_normal_with_a_constant(non_iid):
    dm = AgentLogistic(20, 500, 6, non_iid)
    x, y = dm.train_arrays()
    assert (x[..., -1] == 1).all()
    count = x[..., :-1].size
    assert abs(x[..., :-1].mean()) < 5 / np.sqrt(count)
    assert abs(x[..., :-1].std() - 1) < 5 / np.sqrt(2 * count)
    assert set(np.unique(y)) == {0, 1}


def test_weak_labels_are_independent_of_the_features():
    dm = AgentLogistic(20, 500, 6)
    x, y = dm.train_arrays()
    signs = 2 * y - 1
    assert abs(signs.mean()) < 5 / np.sqrt(y.size)
    # The labels do not correlate with the features.
    assert (np.abs((signs[..., None] * x).mean((0, 1))) < 5 / np.sqrt(y.size)).all()
    assert (dm.true_models, dm.heterogeneity, dm.solve(math.inf)) == (None, None, None)


def test_strong_labels_follow_the_agents_own_models():
    dm = AgentLogistic(200, 100, 6, "strong")
    models = dm.true_models.numpy()
    assert np.abs(models).max() <= 10
    assert abs(models.mean()) < 5 * np.sqrt(100 / 3 / models.size)
    # Var x^2 = (1/5 - 1/9) 10^4 = 0.8 (E x^2)^2.
    assert abs((models**2).mean() / (100 / 3) - 1) < 5 * np.sqrt(0.8 / models.size)
    x, y = dm.train_arrays()
    scores = np.einsum("mnd,md->mn", x, models)
    # b = sign(score + N(0, 1)) is 1 with probability Φ(score).
    p = np.vectorize(lambda s: 0.5 * (1 + math.erf(s / math.sqrt(2))))(scores)
    assert abs((y - p).sum()) < 5 * np.sqrt((p * (1 - p)).sum())
    certain = np.abs(scores) > 8
    np.testing.assert_array_equal(y[certain], scores[certain] > 0)
    unsure = np.abs(scores) < 0.5
    assert 0.1 < (y[unsure] != (scores[unsure] > 0)).mean() < 0.5
    radius = np.linalg.norm(models - models.mean(0), axis=1).max()
    assert dm.heterogeneity == pytest.approx(radius)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.1), (4.0, 2.0)])
def test_smoothness_bounds_the_penalized_objective(alpha, beta):
    dm = AgentLogistic(3, 50, 4, alpha=alpha, beta=beta)
    x, y = map(torch.from_numpy, dm.train_arrays())
    network, loss = PenalizedLogisticRegression(4, alpha, beta).double(), PenalizedCrossEntropy()

    def curvatures(w):
        def objective(k):
            def f(w):
                scores = torch.func.functional_call(network, {"head.weight": w[None]}, (x[k],))
                return loss(scores, y[k]).mean()

            return f

        hessians = [torch.autograd.functional.hessian(objective(k), w) for k in range(3)]
        return torch.linalg.eigvalsh(torch.stack(hessians))

    moments = [np.linalg.eigvalsh(a.numpy().T @ a.numpy() / 50)[-1] for a in x]
    assert dm.smoothness == pytest.approx(max(moments) / 4 + 2 * alpha * beta)
    # At 0 both parts of the objective have their largest curvature.
    at_zero = curvatures(torch.zeros(4, dtype=torch.float64))
    assert at_zero.max().item() == pytest.approx(dm.smoothness)
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0):
        w = scale * torch.randn(4, generator=generator, dtype=torch.float64)
        assert curvatures(w).abs().max() <= dm.smoothness
