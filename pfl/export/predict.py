"""`pfl predict RUN --rows FILE`: what a run's models predict for new samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfl import files
from pfl.datamodules import FederatedDataModule, NewSamples, TensorSamples
from pfl.errors import ConfigError, in_list
from pfl.export.party import PartyRun
from pfl.export.run import POOL, RestoredRun
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.exported import client_network, global_network, has_own_models

SHOWN = 10  # names of clients in a message
TAKEN = ("model", "prediction", "probability")  # columns of the predictions


def predict(
    checkpoint: Path,
    rows: Path,
    out: Path = Path("predictions.csv"),
    id_column: str | None = None,
    *,
    client: str | None = None,
    with_global: bool = False,
) -> Path:
    """Writes a row for each new sample: its id, the model, the prediction, probabilities.

    New samples are given as the run's data module reads them: the rows of a table, with its columns
    (`TableDataModule`); the array `inputs` of an `.npz` file, perhaps with `client_ids`
    (`ArrayDataModule`); or the images of a folder, perhaps in folders with the clients' names
    (`ImageFolderDataModule`). Targets may be missing. With windows, a row is predicted for each row
    with which a client's window ends: the value that comes `horizon` rows later.

    Args:
        checkpoint: The folder of a run, for its last checkpoint; or a checkpoint in it.
        rows: The file or the folder of the samples.
        out: The file that is written.
        id_column: The column of a table that is copied as the id; None: the number of the row, from
            1; the number of the sample, from 0; or the path of the image.
        client: The client whose model predicts; None: the client that each sample names, as rows do
            in the run's `client_column`, where clients have models or numbers of their own, and
            else the global model.
        with_global: Whether the global model predicts.

    Raises:
        ConfigError: There is no such run, client or column, a row lacks a value, or the targets of
            a sample are no single class, value or row of labels.
    """
    if client is not None and with_global:
        raise ConfigError("predict: --client and --global: give one of them")
    _check_rows(rows)
    run = RestoredRun(checkpoint, "predict")
    with run.models_in_use():
        module = run.datamodule.datamodule
        samples = _read(module, rows)
        columns = _ids(samples, rows, id_column)
        owners, numbers = _owners(run, samples, client, with_global)
        names = module.names_or_numbers
        columns["model"] = np.array(["global" if c < 0 else names[c] for c in owners], object)
        gaps = numbers
        named = _named_clients(module, samples)
        if named is not None and client is None and not with_global:
            gaps = named
        _fill_gaps(module, rows, samples, gaps)
        networks = partial(_network_of, run)
        columns |= _predictions(run.model, networks, module, samples.inputs, owners, numbers)
    files.make_folder(out.parent, "predict: --out")
    files.write_csv(out, [columns])
    return out


def predict_at_party(
    party: Path, rows: Path, out: Path = Path("predictions.csv"), id_column: str | None = None
) -> Path:
    """Writes what a party's own model predicts, as `predict` does; no server is needed.

    Args:
        party: The party's file.
        rows: A file with the columns of the party's own table, or what its data module reads.
        out: The file that is written.
        id_column: As of `predict`.
    """
    _check_rows(rows)
    run = PartyRun(party, "predict: --party")
    method = run.party.method
    with method.in_full_precision():
        module = run.own
        samples = _read(module, rows)
        columns = _ids(samples, rows, id_column)
        owners = np.full(len(samples.inputs), run.place)
        columns["model"] = np.full(len(owners), f"party {run.client}", object)
        _fill_gaps(module, rows, samples, owners)
        network = run.network().cpu()
        columns |= _predictions(method, lambda _: network, module, samples.inputs, owners, owners)
    files.make_folder(out.parent, "predict: --out")
    files.write_csv(out, [columns])
    return out


def _check_rows(rows: Path) -> None:
    if not rows.exists():
        raise ConfigError(f"predict: --rows: {rows}; there is no such file or folder")


def _read(module: FederatedDataModule, rows: Path) -> NewSamples:
    """Returns new samples of a file; an error names it."""
    target = _first_target(module)
    places = target.ndim - 1
    if places > 1 or (places == 1 and not target.is_floating_point()):
        raise ConfigError(
            f"predict: a target of the run has the shape {list(target.shape[1:])}, which has no "
            f"place in a row; pfl export writes the model"
        )
    try:
        samples = module.new_samples(rows)
    except ConfigError as error:
        raise ConfigError(f"predict: --rows: {rows}: {error}") from error
    shape = list(samples.inputs.shape[1:])
    expected = list(module.samples.input_shape)
    if shape != expected:
        raise ConfigError(
            f"predict: --rows: {rows}: an input has the shape {shape}; it must be {expected}, as "
            f"in the run"
        )
    return samples


def _first_target(module: FederatedDataModule) -> Tensor:
    """Returns the first target of the run, [1, ...], of which all have the type and the shape."""
    return module.samples.gather(torch.zeros(1, dtype=torch.int64))[1]


def _ids(samples: NewSamples, rows: Path, id_column: str | None) -> dict[str, Any]:
    """Returns the first columns of the predictions: the ids of the samples.

    Where windows of a series are predicted, the time at which each one ends follows.
    """
    columns = dict(samples.ids)
    if id_column is not None:
        if samples.columns is None:
            raise ConfigError(f"predict: --id: {id_column}; only tables have columns")
        if id_column not in samples.columns:
            raise ConfigError(
                f"predict: --id: {id_column}; it must be a column of {rows}, which are "
                f"{', '.join(samples.columns)}"
            )
        del columns[next(iter(columns))]
        columns = {id_column: samples.columns[id_column], **columns}
    for name in columns:
        if name in TAKEN:
            raise ConfigError(
                f"predict: --id: {name}; predictions have a column of this name themselves; give "
                f"it another one in {rows}"
            )
    return columns


def _owners(
    run: RestoredRun, samples: NewSamples, client: str | None, with_global: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns whose model predicts each sample, and by whose numbers, int64 [n].

    These are the client's means and deviations. -1 stands for the global model, and for the numbers
    of all clients.
    """
    method = run.model
    module = run.datamodule.datamodule
    count = len(samples.inputs)
    everyone = np.full(count, -1)
    own = has_own_models(method) and not with_global
    if not own and not module.differs_by_client:
        if client is not None:
            name = type(method).__name__
            raise ConfigError(
                f"predict: --client: {name} has one model for all clients; leave it out"
            )
        return everyone, everyone
    if client is not None:
        whose = np.full(count, run.number(client, "predict: --client", ""))
    else:
        whose = _clients_of(run, module, samples, own)
    if own:
        return whose, whose
    return everyone, whose


def _clients_of(
    run: RestoredRun, module: FederatedDataModule, samples: NewSamples, own: bool
) -> np.ndarray:
    """Returns the client that each sample names, int64 [n]."""
    found = _named_clients(module, samples)
    names = module.client_names
    if found is None or names is None:
        ways = ["--client"]
        if own:
            why = f"{type(run.model).__name__} has a model for each client"
            if run.model.has_global:
                ways.append("--global")
        else:
            why = "the run's samples are scaled by client"
        if names is not None and samples.naming:
            ways.append(samples.naming)
        raise ConfigError(f"predict: {why}; give {' or '.join(ways)}")
    unknown = np.flatnonzero(found < 0)
    if len(unknown):
        row = int(unknown[0])
        assert samples.clients is not None
        otherwise = ""
        if not module.differs_by_client and run.model.has_global:
            otherwise = "--global, or "
        some = ", ".join(map(in_list, names[:SHOWN]))
        raise ConfigError(
            f"predict: --rows: the client {samples.clients[row]!r} of {_place(samples, row)} was "
            f"not in the run; give {otherwise}--client with one of {some}"
        )
    return found


def _named_clients(module: FederatedDataModule, samples: NewSamples) -> np.ndarray | None:
    """Returns the client of the run that each sample names, int64 [n]; -1 for another one.

    None where samples name no client, or the run's clients have no names.
    """
    names = module.client_names
    if samples.clients is None or names is None:
        return None
    known = {name: number for number, name in enumerate(names)}
    return np.array([known.get(client, -1) for client in samples.clients])


def _place(samples: NewSamples, number: int) -> str:
    """Returns the name of a sample, such as row 3, for a message."""
    name, ids = next(iter(samples.ids.items()))
    return f"{name} {ids[number]}"


def _name_of(module: FederatedDataModule, place: int) -> str:
    """Returns the name of a column of the inputs, or its number."""
    if module.feature_names is None:
        return str(place)
    return repr(module.feature_names[place])


def _fill_gaps(
    module: FederatedDataModule, path: Path, samples: NewSamples, owners: np.ndarray
) -> None:
    """Gives missing values [n, F], NaN, the means of the run's training samples, in place.

    They are those of the client that is given or that the row names, as in the run's own scores,
    and else of all clients.
    """
    values = samples.inputs
    infinite = np.isinf(values)
    if infinite.any():
        place = int(np.argwhere(infinite)[0][1])
        raise ConfigError(
            f"predict: --rows: {path}: the column {_name_of(module, place)} holds a value "
            f"that is infinite as float32; a prediction needs finite ones"
        )
    gaps = np.isnan(values)
    if not gaps.any():
        return
    for owner in np.unique(owners[gaps.any(1)]).tolist():
        client = None
        if owner >= 0:
            client = owner
        means = np.array(module.gap_values(client), values.dtype)
        mine = gaps & (owners == owner)[:, None]
        values[mine] = np.broadcast_to(means, values.shape)[mine]
    if np.isnan(values).any():
        row, place = np.argwhere(np.isnan(values))[0].tolist()
        raise ConfigError(
            f"predict: --rows: {path}: {_place(samples, row)} has no value of "
            f"{_name_of(module, place)}, and the client's training samples have none either"
        )


def _predictions(
    method: FederatedAlgorithm,
    networks: Callable[[int], nn.Module],
    module: FederatedDataModule,
    values: np.ndarray,
    owners: np.ndarray,
    numbers: np.ndarray,
) -> dict[str, np.ndarray]:
    """Returns the columns of the predictions.

    Args:
        method: The method.
        networks: Returns the network of an owner.
        module: Where the transforms and the names of classes come from.
        values: The inputs, [n, ...].
        owners: Whose model predicts each sample, int64 [n]; -1: the global one.
        numbers: By whose means and deviations, int64 [n]; -1: by those of all clients.
    """
    samples = TensorSamples(values, torch.zeros(len(values)))
    result: dict[str, np.ndarray] = {}
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        network = networks(int(owners[places[0]]))
        for part in np.array_split(places, -(-len(places) // POOL)):
            index = torch.from_numpy(part)
            whose = torch.full((len(part),), max(number, 0))
            inputs = module.transforms(samples.gather(index)[0], whose, index)
            if inputs.is_floating_point():  # tokens stay whole numbers
                inputs = inputs.to(method.global_model.dtype)
            for name, column in _columns(method, module, network, inputs, number).items():
                if name not in result:
                    result[name] = np.empty(len(owners), column.dtype)
                result[name][part] = column
    return result


def _network_of(run: RestoredRun, owner: int) -> nn.Module:
    if owner < 0:
        return global_network(run.model)
    return client_network(run.model, owner)


def _columns(
    method: FederatedAlgorithm,
    module: FederatedDataModule,
    network: nn.Module,
    inputs: Tensor,
    number: int,
) -> dict[str, np.ndarray]:
    """Returns predictions and probabilities of a client's inputs, by the names of their columns."""
    runner = method.oracle.runner
    outputs = network(inputs)
    like = _first_target(module)
    if like.is_floating_point():
        like = like.to(outputs)
    targets = runner.as_compared(outputs, like.expand(len(inputs), *like.shape[1:]))
    decided = runner.decisions(outputs, targets)
    chances = runner.predicted(outputs, targets)[0]
    if targets.is_floating_point():
        if number >= 0:
            decided = module.own_unit(number, decided)
        columns = _one_a_label("prediction", decided)
        if runner.label_threshold is not None:
            columns |= _one_a_label("probability", chances)
        return columns
    names = [str(number) for number in range(outputs.shape[1])]
    if module.class_names is not None:  # the network may have more outputs than there are classes
        further = [f"output {number}" for number in range(len(module.class_names), len(names))]
        names = [*module.class_names, *further]
    columns = {"prediction": np.array([names[k] for k in decided.tolist()], object)}
    for number, name in enumerate(names):
        columns[f"probability of {name}"] = chances[:, number].numpy()
    return columns


def _one_a_label(name: str, values: Tensor) -> dict[str, np.ndarray]:
    """Returns values [n] or [n, L] as columns: one of this name, or one for each of L labels."""
    flat = values.reshape(len(values), -1).numpy()
    if flat.shape[1] == 1:
        return {name: flat[:, 0]}
    return {f"{name} {label}": flat[:, label] for label in range(flat.shape[1])}
