"""`loop.evaluate: [train]`: the models' scores on the clients' own training samples."""

import csv

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet
from models import LogisticRegression
from pfl import FederatedLoop, Trainer
from pfl.algorithms import Ditto


def rows_of(trainer):
    with (trainer.run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_training_scores_are_those_of_the_clients_models(tmp_path):
    torch.manual_seed(0)
    data = DigitsDataModule(5, Dirichlet(1.0), seed=0)
    method = Ditto(LogisticRegression(64), penalty=0.5, lr=0.1, local_steps=3)
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=2, accelerator="cpu")
    trainer.fit(method, datamodule=FederatedLoop(data, evaluate=("train", "test")))
    last = rows_of(trainer)[-1]
    own = {"global": [], "personalized": []}
    losses = {"global": [], "personalized": []}
    for client in range(5):
        batches = list(data.client(client).train_dataloader())
        x = torch.cat([inputs for inputs, _ in batches])
        y = torch.cat([targets for _, targets in batches])
        personalized = method.states.rows("v", np.array([client]))[0]
        models = {"global": method.global_model, "personalized": personalized}
        for name, flat in models.items():
            weight, bias = flat[:640].reshape(10, 64), flat[640:]
            scores = x.reshape(len(x), 64) @ weight.T + bias
            own[name].append(float((scores.argmax(1) == y).double().mean()))
            losses[name].append(float(torch.nn.functional.cross_entropy(scores, y)))
    for name in own:
        assert float(last[f"train/{name}/accuracy"]) == pytest.approx(np.mean(own[name]))
        assert float(last[f"train/{name}/loss"]) == pytest.approx(np.mean(losses[name]), rel=1e-5)
        assert float(last[f"train/{name}/accuracy"]) != float(last[f"test/{name}/accuracy"])
