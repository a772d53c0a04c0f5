"""Faults that are planted into a client's samples, states and messages, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchmetrics import Metric

from datamodules import (
    IID,
    ArrayDataModule,
    DatasetSamples,
    FederatedDataModule,
    ImageFolderDataModule,
    Loaded,
    Natural,
    SplitOwn,
    TableDataModule,
    Transform,
)
from models import HalfSquaredError
from pfl.algorithms import FedAvg, LocalTrain
from pfl.communication import Message
from tests.problems import run

NAMES = ("north", "south", "west")
Plant = Callable[[Path], None]
FAULTS: dict[str, tuple[Plant, list[str]]] = {}


def planted(*words: str) -> Callable[[Plant], Plant]:
    """Notes a fault, and the words that its line must have."""

    def note(plant: Plant) -> Plant:
        FAULTS[plant.__name__.replace("_", " ")] = (plant, list(words))
        return plant

    return note


def fit(root: Path, data: FederatedDataModule, method: Any = None, rounds: int = 2, **loop: Any):
    """Trains for two rounds."""
    torch.manual_seed(0)
    if method is None:
        method = FedAvg(nn.Linear(2, 3), lr=0.1, engine="sequential")
    return run(method, data, rounds, root=root, precision="32-true", **loop)


# ---- arrays -------------------------------------------------------------------------------------


def arrays(**changed: Any) -> ArrayDataModule:
    """Samples 0 to 5 of north, 6 to 11 of south, 12 to 17 of west; then the official test's."""
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {
        "inputs": rng.normal(size=(18, 2)).astype(np.float32),
        "targets": np.arange(18) % 3,
        "client_ids": np.repeat(NAMES, 6),
    }
    settings: dict[str, Any] = {"partition": Natural(), "protocol": SplitOwn(0.3, 0.2)}
    for key, change in changed.items():
        if callable(change):
            change(values[key])
        else:
            (values if key in values or key.startswith("test_") else settings)[key] = change
    return ArrayDataModule(**values, **settings)


def put(*place: Any, value: Any) -> Callable[[np.ndarray], None]:
    """Returns what writes a value to a place of an array."""

    def change(array: np.ndarray) -> None:
        array[place] = value

    return change


REAL = np.linspace(0, 1, 18).astype(np.float32)


@planted("inputs", "sample 7", "south")
def inputs_with_nan(root):
    arrays(inputs=put(7, 1, value=np.nan)).setup()


@planted("inputs", "sample 13", "west")
def infinite_inputs(root):
    arrays(inputs=put(13, 0, value=-np.inf)).setup()


@planted("targets", "sample 8", "south")
def targets_with_nan(root):
    arrays(targets=np.where(np.arange(18) == 8, np.nan, REAL)).setup()


@planted("targets", "sample 17", "west")
def infinite_targets(root):
    arrays(targets=np.where(np.arange(18) == 17, np.inf, REAL)).setup()


@planted("target", "-2", "sample 6", "south")
def a_negative_class(root):
    arrays(targets=put(6, value=-2)).setup()


@planted("inputs", "sample 9")
def inputs_with_nan_where_clients_are_drawn(root):
    data = arrays(inputs=put(9, 0, value=np.nan), partition=IID(), num_clients=1, client_ids=None)
    data.setup()


@planted("class 7", "south")
def a_class_beyond_the_outputs(root):
    fit(root, arrays(targets=put(8, value=7)))


@planted("test_inputs", "sample 1")
def test_inputs_with_nan(root):
    test = np.zeros((3, 2), np.float32)
    test[1, 1] = np.nan
    arrays(test_inputs=test, test_targets=np.arange(3)).setup()


@planted("targets", "sample 9", "south")
def labels_with_nan(root):
    labels = np.ones((18, 2), np.float32)
    labels[9, 1] = np.nan
    arrays(targets=labels).setup()


@planted("-3", "sample 10", "south")
def a_negative_class_of_a_pixel(root):
    targets = np.zeros((18, 2, 2), np.int64)
    targets[10, 1, 0] = -3
    fit(root, arrays(targets=targets), FedAvg(PixelScores(), engine="sequential"))


class PixelScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 12)

    def forward(self, x):
        return self.head(x).view(-1, 3, 2, 2)


@planted("class 9", "sample 10", "south")
def a_pixel_beyond_the_outputs(root):
    targets = np.zeros((18, 2, 2), np.int64)
    targets[10, 1, 0] = 9
    fit(root, arrays(targets=targets), FedAvg(PixelScores(), engine="sequential"))


@planted("client_ids", "sample 4")
def an_id_that_is_missing(root):
    ids = np.repeat(NAMES, 6).astype(object)
    ids[4] = None
    arrays(client_ids=ids).setup()


@planted("client_ids", "sample 4")
def an_id_that_is_no_number(root):
    ids = np.repeat([1.0, 2.0, 3.0], 6)
    ids[4] = np.nan
    arrays(client_ids=ids).setup()


# ---- tables -------------------------------------------------------------------------------------


def table(root: Path, row: int, column: str, cell: str, **settings: Any) -> TableDataModule:
    """Rows 1 to 6 of north, 7 to 12 of south, 13 to 18 of west; one cell is changed."""
    names = ["site", "hour", "age", "blood", "y"]
    lines = []
    for number in range(18):
        own = [
            NAMES[number // 6],
            str(number),
            str(20 + number),
            "AB"[number % 2],
            "ny"[number % 2],
        ]
        lines.append(own)
    lines[row - 1][names.index(column)] = cell
    text = "\n".join(",".join(line) for line in [names, *lines]) + "\n"
    (root / "t.csv").write_text(text)
    given = {"categories": "one-hot", "partition": Natural(), **settings}
    return TableDataModule(root / "t.csv", "y", client_column="site", **given)


@planted("age", "'old'", "row 8", "south")
def a_cell_that_is_no_number(root):
    table(root, 8, "age", "old", feature_columns=["hour", "age"], categories=None).setup()


@planted("age", "sample 7", "south")
def an_infinite_cell(root):
    table(root, 8, "age", "inf").setup()


@planted("age", "row 14", "west")
def a_cell_that_is_missing(root):
    table(root, 14, "age", "").setup()


@planted("y", "row 14", "west")
def a_target_that_is_missing(root):
    table(root, 14, "y", "").setup()


@planted("site", "row 5")
def a_client_that_is_missing(root):
    table(root, 5, "site", "").setup()


@planted("blood", "'X'", "row 9", "south")
def an_unknown_level(root):
    table(root, 9, "blood", "X", levels={"blood": ["A", "B"]}).setup()


@planted("y", "'maybe'", "row 9", "south")
def an_unknown_class(root):
    table(root, 9, "y", "maybe", class_names=["n", "y"]).setup()


@planted("hour", "'maybe'", "row 9", "south")
def a_target_that_is_no_number(root):
    data = table(root, 9, "hour", "maybe", target_kind="numbers")
    data.target_column = "hour"
    data.setup()


@planted("hour", "row 10", "south")
def a_time_that_is_missing(root):
    protocol = SplitOwn(0.3, 0.0, order="hour")
    table(root, 10, "hour", "", feature_columns=["age"], protocol=protocol).setup()


@planted("hour", "'noon'", "row 10", "south")
def a_time_that_is_none(root):
    protocol = SplitOwn(0.3, 0.0, order="hour")
    table(root, 10, "hour", "noon", feature_columns=["age"], protocol=protocol).setup()


@planted("order_column", "8 and 9", "south")
def two_rows_at_one_time(root):
    protocol = SplitOwn(0.3, 0.0, order="hour")
    settings = dict(window=2, order_column="hour", protocol=protocol)
    table(root, 9, "hour", "7", feature_columns=["age"], **settings).setup()


@planted("row 11")
def a_row_with_a_cell_too_many(root):
    table(root, 11, "y", "n,1").setup()


@planted("age", "sample 14", "west")
def a_cell_beyond_float32(root):
    table(root, 15, "age", "1e300").setup()


@planted("age", "south")
def a_client_without_any_value(root):
    data = table(root, 1, "age", "20", missing="mean")
    lines = (root / "t.csv").read_text().splitlines()
    for number in range(7, 13):
        cells = lines[number].split(",")
        cells[2] = ""
        lines[number] = ",".join(cells)
    (root / "t.csv").write_text("\n".join(lines) + "\n")
    data.setup()


# ---- images -------------------------------------------------------------------------------------


def images(root: Path, spoil: Callable[[Path], None], **settings: Any) -> ImageFolderDataModule:
    """Images of three clients and two classes, of which one of south is spoiled."""
    for client in NAMES:
        for label in ("cat", "dog"):
            for number in range(3):
                path = root / "i" / client / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (number, 9, 9)).save(path)
    spoil(root / "i" / "south" / "dog" / "1.png")
    return ImageFolderDataModule(root / "i", levels="client/class", partition=Natural(), **settings)


SPOILED = ("south", "dog", "1.png")


@planted(*SPOILED)
def a_damaged_image(root):
    images(root, lambda path: path.write_bytes(b"no image")).setup()


@planted(*SPOILED)
def an_image_that_is_cut(root):
    def cut(path):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:90])

    images(root, cut).setup()


@planted(*SPOILED)
def an_empty_image(root):
    images(root, lambda path: path.write_bytes(b"")).setup()


@planted(*SPOILED)
def an_image_of_another_size(root):
    images(root, lambda path: Image.new("RGB", (9, 8)).save(path)).setup()


@planted(*SPOILED)
def an_image_of_16_bits_among_others(root):
    images(root, lambda path: Image.new("I;16", (8, 8)).save(path)).setup()


@planted("south/1.png")
def an_image_in_the_wrong_folder(root):
    images(root, lambda path: path.rename(path.parents[1] / "1.png")).setup()


# ---- data sets of items -------------------------------------------------------------------------


class Items(Dataset):
    """Items by number, of which one is something else."""

    def __init__(self, number: int, other: Any) -> None:
        self.number, self.other = number, other

    def __len__(self) -> int:
        return 18

    def __getitem__(self, i: int) -> Any:
        if i != self.number:
            return torch.full((2,), i / 18), i % 3
        if isinstance(self.other, Exception):
            raise self.other
        return self.other


class Streamed(FederatedDataModule):
    """Six items for each of three clients."""

    def __init__(self, number: int, other: Any) -> None:
        super().__init__(partition=Natural(), protocol=SplitOwn(0.0, 0.0))
        self.items = Items(number, other)

    def load(self) -> Loaded:
        samples = DatasetSamples(self.items, torch.arange(18) % 3)
        return Loaded(samples, None, np.repeat(NAMES, 6))


@planted("[3]", "item 8", "south", "round")
def an_item_of_another_shape(root):
    fit(root, Streamed(8, (torch.zeros(3), 0)))


@planted("item 8", "south", "round")
def an_item_that_is_no_pair(root):
    fit(root, Streamed(8, torch.zeros(3)))


@planted("item 8", "gone")
def an_item_that_cannot_be_read(root):
    fit(root, Streamed(8, OSError("gone")))


@planted("south", "round 1")
def an_item_with_nan(root):
    fit(root, Streamed(8, (torch.full((2,), torch.nan), 0)))


@planted("south", "round 1")
def an_item_whose_target_is_another_one(root):
    fit(root, Streamed(8, (torch.zeros(2), 7)))


# ---- rounds -------------------------------------------------------------------------------------


class Broken(FedAvg):
    """FedAvg, of which a function changes what client 1 does in the second round."""

    def __init__(self, change: Callable[..., Any], kind: str = "w", **kwargs: Any) -> None:
        super().__init__(nn.Linear(2, 3), lr=0.1, engine="sequential", **kwargs)
        self.change = change
        self.add_client_state("kept")

    def client_update(self, clients, w):
        v = super().client_update(clients, w)
        if clients.round == 1 and 1 in clients.ids:
            return self.change(clients, v)
        return v


def in_round_two(root: Path, change: Callable[..., Any]) -> None:
    fit(root, arrays(), Broken(change), clients_at_once=1, evaluate=())


@planted("south", "round 2", "client 1")
def a_client_that_diverges(root):
    in_round_two(root, lambda clients, v: v * torch.inf)


@planted("south", "round 2", "message extra")
def another_message_that_is_not_finite(root):
    def change(clients, v):
        return {"w": v, "extra": v[:, :1] / 0}

    in_round_two(root, change)


@planted("south", "round 2", "state kept")
def a_state_that_is_not_finite(root):
    def change(clients, v):
        clients.state["kept"] = v * torch.nan
        return v

    in_round_two(root, change)


@planted("south", "round 2", "[1, 2]")
def a_message_of_another_shape(root):
    in_round_two(root, lambda clients, v: v[:, :2])


@planted("south", "round 2", "float64")
def a_message_of_another_type(root):
    in_round_two(root, lambda clients, v: v.double())


@planted("south", "round 2", "returned None")
def no_message(root):
    in_round_two(root, lambda clients, v: None)


@planted("south", "round 2", "'x'")
def an_exception_in_a_method(root):
    in_round_two(root, lambda clients, v: {}["x"])


@planted("south", "round 2", "lost")
def a_state_without_a_declaration(root):
    def change(clients, v):
        clients.state["lost"] = v
        return v

    in_round_two(root, change)


@planted("south", "round 2", "-4")
def a_message_of_negative_size(root):
    in_round_two(root, lambda clients, v: Message(v, -4))


@planted("south", "round 2", "kept", "[1, 2]")
def a_state_of_another_shape(root):
    def change(clients, v):
        clients.state["kept"] = v[:, :2]
        return v

    in_round_two(root, change)


@planted("south", "round")
def inputs_that_overflow(root):
    data = arrays(inputs=put(slice(6, 12), value=1e25))
    fit(root, data, clients_at_once=1, evaluate=())


@planted("south", "round 1", "state w")
def a_personal_model_that_diverges(root):
    data = arrays(inputs=put(slice(6, 12), value=1e30), targets=REAL)
    method = LocalTrain(nn.Linear(2, 1), lr=0.1, engine="sequential", loss=HalfSquaredError())
    fit(root, data, method, clients_at_once=1, evaluate=())


class Turned(Transform):
    """A transform that cannot take the samples of a client."""

    def __call__(self, inputs, draws):
        if 1 in draws.clients.reshape(-1).tolist():
            raise ValueError("the angle is missing")
        return inputs


@planted("south", "the angle is missing", "round 1")
def a_transform_that_fails(root):
    fit(root, arrays(transforms=[Turned()]), clients_at_once=1, evaluate=())


class Picky(Metric):
    """A metric that refuses the samples of a client with two of them."""

    higher_is_better = True

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.result = result
        self.seen = torch.zeros(0)

    def update(self, predicted, targets):
        self.seen = targets
        if self.result is None and 2 in targets.tolist() and len(targets) == 2:
            raise ValueError("no class 2")

    def compute(self):
        if self.result is not None and len(self.seen) == 2 and 2 in self.seen.tolist():
            return self.result
        return torch.tensor(1.0)


def for_picky() -> ArrayDataModule:
    targets = np.array([0, 1] * 9)
    targets[6:12] = 2
    return arrays(targets=targets)


@planted("south", "Picky", "no class 2", "round 1")
def a_metric_that_refuses_a_client(root):
    fit(root, for_picky(), metrics=[Picky()])


@planted("south", "Picky", "round 1")
def a_metric_with_several_values_for_a_client(root):
    fit(root, for_picky(), metrics=[Picky(torch.ones(2))])


@planted("loop.trace", "9", "round 2")
def a_cohort_with_an_unknown_client(root):
    fit(root, arrays(), trace=[[0], [9]])


@planted("loop.unseen", "9")
def an_unknown_newcomer(root):
    fit(root, arrays(), unseen=[9])


@planted("loop.dropout", "9", "round 2")
def an_unknown_client_that_fails(root):
    fit(root, arrays(), dropout=[[0], [9]])


# ---- files --------------------------------------------------------------------------------------


@planted("south has 2 inputs and 1 targets")
def a_user_of_leaf_without_a_target(root):
    from datamodules import FEMNISTDataModule
    from tests import leaf_files

    pair = (leaf_files.images(1, 2), [0, 1])
    users = {"north": pair, "south": (pair[0], [0])}
    leaf_files.write(root, "femnist", "train", users)
    leaf_files.write(root, "femnist", "test", {"north": pair, "south": pair})
    FEMNISTDataModule(root=root).setup()


@planted("south", "y")
def a_user_of_leaf_whose_class_is_text(root):
    from datamodules import FEMNISTDataModule
    from tests import leaf_files

    pair = (leaf_files.images(1, 2), [0, 1])
    leaf_files.write(root, "femnist", "train", {"north": pair, "south": (pair[0], [0, "a"])})
    leaf_files.write(root, "femnist", "test", {"north": pair, "south": pair})
    FEMNISTDataModule(root=root).setup()


@planted("south", "listed twice")
def a_user_of_leaf_in_two_files(root):
    from datamodules import FEMNISTDataModule
    from tests import leaf_files

    pair = (leaf_files.images(1, 2), [0, 1])
    for number in range(2):
        users = {f"north{number}": pair, "south": pair}
        leaf_files.write(root, "femnist", "train", users, f"all_data_{number}.json")
    leaf_files.write(root, "femnist", "test", {"north0": pair})
    FEMNISTDataModule(root=root).setup()


class NoSecond(nn.Module):
    """A loss that cannot take the class of one client."""

    def forward(self, outputs, targets):
        if (targets == 2).any():
            raise ValueError("no class 2")
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


@planted("south", "no class 2", "round 1")
def a_loss_that_fails(root):
    method = FedAvg(nn.Linear(2, 3), loss=NoSecond(), lr=0.1, engine="sequential")
    fit(root, for_picky(), method, clients_at_once=1, evaluate=())


class Personal(FedAvg):
    """FedAvg whose personalized model of client 1 is another one after the second round."""

    has_personalized = True

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(nn.Linear(2, 3), lr=0.1, engine="sequential")
        self.change = change
        self.add_client_state("trained")

    def client_update(self, clients, w):
        v = super().client_update(clients, w)
        clients.state["trained"] = v + (clients.round == 1)
        return v

    def personalized(self, clients):
        w = clients.received["w"].repeat(len(clients), 1)
        if 1 in clients.ids and (clients.state["trained"] > 0.9).any():
            return self.change(w)
        return w


@planted("south", "[1, 2]", "round 2")
def a_personal_model_of_another_shape(root):
    fit(root, arrays(), Personal(lambda w: w[:, :2]), clients_at_once=1)
