"""`pfl predict RUN --rows FILE`: what a run's models predict for the rows of a new table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfl import files
from pfl.datamodules import FederatedDataModule, TableDataModule
from pfl.datamodules.sources.table_files import Table
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
    """Writes a row for each row of a table: its id, the model, the prediction, probabilities.

    The run's data must be a `TableDataModule`. The table has its columns, with or without the
    target. With windows, a row is predicted for each row with which a client's window ends: the
    value that comes `horizon` rows later.

    Args:
        checkpoint: The folder of a run, for its last checkpoint; or a checkpoint in it.
        rows: A `.csv` or `.parquet` file.
        out: The file that is written.
        id_column: The column that is copied as the id; None: the number of the row, from 1.
        client: The client whose model predicts; None: for each row the client in the run's
            `client_column`, where clients have models or numbers of their own, and else the global
            model.
        with_global: Whether the global model predicts.

    Raises:
        ConfigError: There is no such run, client or column, or a row lacks a value.
    """
    if client is not None and with_global:
        raise ConfigError("predict: --client and --global: give one of them")
    _check_rows(rows)
    run = RestoredRun(checkpoint, "predict")
    with run.models_in_use():
        module = _table_of(run.datamodule.datamodule)
        values, table, places = _read(module, rows)
        columns = _ids(module, table, rows, places, id_column)
        owners, numbers = _owners(run, table, len(values), client, with_global)
        names = module.names_or_numbers
        columns["model"] = np.array(["global" if c < 0 else names[c] for c in owners], object)
        gaps = numbers
        if client is None and not with_global:
            gaps = _clients_of_gaps(module, table, numbers)
        _fill_gaps(module, rows, values, gaps)
        networks = partial(_network_of, run)
        columns |= _predictions(
            run.model, networks, module, torch.from_numpy(values), owners, numbers
        )
    files.make_folder(out.parent, "predict: --out")
    files.write_csv(out, [columns])
    return out


def predict_at_party(
    party: Path, rows: Path, out: Path = Path("predictions.csv"), id_column: str | None = None
) -> Path:
    """Writes what a party's own model predicts, as `predict` does; no server is needed.

    Args:
        party: The party's file.
        rows: A `.csv` or `.parquet` file with the columns of the party's own table.
        out: The file that is written.
        id_column: As of `predict`.
    """
    _check_rows(rows)
    run = PartyRun(party, "predict: --party")
    method = run.party.method
    with method.in_full_precision():
        module = _table_of(run.own)
        values, table, places = _read(module, rows)
        columns = _ids(module, table, rows, places, id_column)
        owners = np.full(len(values), run.place)
        columns["model"] = np.full(len(values), f"party {run.client}", object)
        _fill_gaps(module, rows, values, owners)
        network = run.network().cpu()
        columns |= _predictions(
            method, lambda _: network, module, torch.from_numpy(values), owners, owners
        )
    files.make_folder(out.parent, "predict: --out")
    files.write_csv(out, [columns])
    return out


def _check_rows(rows: Path) -> None:
    if rows.suffix not in (".csv", ".parquet") or not rows.is_file():
        raise ConfigError(f"predict: --rows: {rows}; it must be an existing .csv or .parquet file")


def _read(module: TableDataModule, rows: Path) -> tuple[np.ndarray, Table, np.ndarray]:
    """Returns what `TableDataModule.rows` returns; its errors name the file."""
    try:
        return module.rows(rows)
    except ConfigError as error:
        raise ConfigError(f"predict: --rows: {rows}: {error}") from error


def _table_of(module: FederatedDataModule) -> TableDataModule:
    if not isinstance(module, TableDataModule):
        kind = type(module).__name__
        raise ConfigError(f"predict: --rows: the run's data are {kind}; rows need a table's")
    return module


def _ids(
    module: TableDataModule, table: Table, rows: Path, places: np.ndarray, id_column: str | None
) -> dict[str, Any]:
    """Returns the first columns of the predictions: the ids of rows, or their numbers from 1.

    Where windows of a series are predicted, the time at which each one ends follows.
    """
    columns: dict[str, Any] = {"row": places + 1}
    if id_column is not None:
        if id_column not in table:
            raise ConfigError(
                f"predict: --id: {id_column}; it must be a column of {rows}, which are "
                f"{', '.join(table)}"
            )
        column = table[id_column]
        columns = {id_column: np.array(column.cells or column.values, object)}
    if module.window is not None and module.order_column is not None:
        column = table[module.order_column]
        columns[module.order_column] = np.array(column.cells or column.values, object)
    for name in columns:
        if name in TAKEN:
            raise ConfigError(
                f"predict: --id: {name}; predictions have a column of this name themselves; give "
                f"it another one in {rows}"
            )
    return columns


def _owners(
    run: RestoredRun, table: Table, count: int, client: str | None, with_global: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns whose model predicts each row, and by whose numbers, int64 [n].

    These are the client's means and deviations. -1 stands for the global model, and for the numbers
    of all clients.
    """
    method = run.model
    module = run.datamodule.datamodule
    assert isinstance(module, TableDataModule)
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
        whose = _clients_of_rows(run, module, table, own)
    if own:
        return whose, whose
    return everyone, whose


def _clients_of_rows(
    run: RestoredRun, module: TableDataModule, table: Table, own: bool
) -> np.ndarray:
    """Returns the client that each row names, int64 [n]."""
    cells = _named_clients(module, table)
    names = module.client_names
    if cells is None or names is None:
        why = f"{type(run.model).__name__} has a model for each client"
        ways = ["--client", "--global"]
        if not own:
            why = "the run's samples are scaled by client"
            ways = ["--client"]
        if names is not None and module.client_column is not None:
            ways.append(f"rows with the column {module.client_column!r}")
        raise ConfigError(f"predict: {why}; give {' or '.join(ways)}")
    otherwise = ""
    if not module.differs_by_client:
        otherwise = "--global, or "
    known = {name: number for number, name in enumerate(names)}
    for row, cell in enumerate(cells, 1):
        if cell not in known:
            raise ConfigError(
                f"predict: --rows: the client {cell!r} of row {row} was not in the run; give "
                f"{otherwise}--client with one of {', '.join(map(in_list, names[:SHOWN]))}"
            )
    return np.array([known[cell] for cell in cells])


def _named_clients(module: TableDataModule, table: Table) -> list[str] | None:
    """Returns the name of a client in each row; None without names, or without their column."""
    name = module.client_column
    if module.client_names is None or name is None or name not in table:
        return None
    column = table[name]
    return [str(cell) for cell in (column.cells or column.values)]


def _clients_of_gaps(module: TableDataModule, table: Table, otherwise: np.ndarray) -> np.ndarray:
    """Returns the client of the run that each row names, int64 [n]; -1 for another one.

    Where rows name no client, `otherwise` is returned.
    """
    cells = _named_clients(module, table)
    if cells is None:
        return otherwise
    known = {name: number for number, name in enumerate(module.names_or_numbers)}
    return np.array([known.get(cell, -1) for cell in cells])


def _fill_gaps(module: TableDataModule, path: Path, values: np.ndarray, owners: np.ndarray) -> None:
    """Gives missing values [n, F], NaN, the means of the run's training samples, in place.

    They are those of the client that is given or that the row names, as in the run's own scores,
    and else of all clients.
    """
    infinite = np.isinf(values)
    if infinite.any():
        assert module.feature_names is not None
        place = int(np.argwhere(infinite)[0][1])
        raise ConfigError(
            f"predict: --rows: {path}: the column {module.feature_names[place]!r} holds a value "
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
        assert module.feature_names is not None
        raise ConfigError(
            f"predict: --rows: {path}: row {row + 1} after the names has no value of "
            f"{module.feature_names[place]!r}, and the client's training samples have none either"
        )


def _predictions(
    method: FederatedAlgorithm,
    networks: Callable[[int], nn.Module],
    module: TableDataModule,
    values: Tensor,
    owners: np.ndarray,
    numbers: np.ndarray,
) -> dict[str, np.ndarray]:
    """Returns the columns of the predictions of rows [n, F] or windows [n, F, W].

    Args:
        method: The method.
        networks: Returns the network of an owner.
        module: Where the rows' columns, levels and transforms come from.
        values: The rows.
        owners: Whose model predicts each row, int64 [n]; -1: the global one.
        numbers: By whose means and deviations, int64 [n]; -1: by those of all clients.
    """
    result: dict[str, np.ndarray] = {}
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        network = networks(int(owners[places[0]]))
        for part in np.array_split(places, -(-len(places) // POOL)):
            index = torch.from_numpy(part)
            whose = torch.full((len(part),), max(number, 0))
            inputs = module.transforms(values[index], whose, index)
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
    module: TableDataModule,
    network: nn.Module,
    inputs: Tensor,
    number: int,
) -> dict[str, np.ndarray]:
    """Returns predictions and probabilities of a client's inputs, by the names of their columns."""
    runner = method.oracle.runner
    outputs = network(inputs)
    like = module.samples.gather(torch.zeros(1, dtype=torch.int64))[1]
    if like.is_floating_point():
        like = like.to(outputs)
    targets = runner.as_compared(outputs, like.expand(len(inputs), *like.shape[1:]))
    decided = runner.decisions(outputs, targets)
    chances = runner.predicted(outputs, targets)[0]
    if targets.is_floating_point():
        if number >= 0:
            decided = module.own_unit(number, decided)
        columns = {"prediction": decided.reshape(len(inputs), -1)[:, 0].numpy()}
        if runner.label_threshold is not None:
            columns["probability"] = chances.reshape(len(inputs), -1)[:, 0].numpy()
        return columns
    names = [str(number) for number in range(outputs.shape[1])]
    if module.class_names is not None:  # the network may have more outputs than there are classes
        further = [f"output {number}" for number in range(len(module.class_names), len(names))]
        names = [*module.class_names, *further]
    columns = {"prediction": np.array([names[k] for k in decided.tolist()], object)}
    for number, name in enumerate(names):
        columns[f"probability of {name}"] = chances[:, number].numpy()
    return columns
