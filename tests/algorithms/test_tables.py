"""Tables that a method records: what is in the files, and that a resumed run mends them."""

import csv
import shutil

import lightning.pytorch as pl
import numpy as np
import pytest

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.callbacks import RoundCheckpoint
from tests.problems import History, least_squares, quiet

SIZES = (7, 2, 5, 3, 4)
TRACE = [[0, 1, 2, 3, 4], [1, 4], [], [0, 2, 3], [4], [0, 1, 3, 4]]


class Noted(FedAvg):
    """Writes down two numbers of every client, the pairs of clients, and nothing."""

    tables = ("norms", "pairs", "empty")

    def client_update(self, clients, w):
        v = super().client_update(clients, w)
        self.log_table("norms", client=clients.ids, sum=v.sum(1), samples=clients.sizes)
        # Two calls a chunk, in an order of their own.
        for parity in (1, 0):
            for i in clients.ids[clients.ids % 2 == parity][::-1]:
                partners = np.arange(i)[::-1]
                self.log_table(
                    "pairs",
                    client=np.full(len(partners), i),
                    partner=partners,
                    weight=1.0 / (1 + i + partners),
                )
        return v


class Locals(History):
    """Sums of the local models, from the definition: one full gradient step from the model."""

    def __init__(self, problem, start):
        super().__init__()
        self.problem, self.before = problem, start

    def sums(self, t):
        w = self["w"][t - 1] if t else self.before
        return {i: float((w - 0.1 * self.problem.gradient(i, w)).sum()) for i in TRACE[t]}


@pytest.fixture(scope="module")
def problem():
    return least_squares(SIZES, bias=True)


START = np.linspace(-1.0, 1.0, 8)


def train(root, problem, rounds, *callbacks, ckpt_path=None, at_once=None, name="run"):
    arguments = dict(name=name, precision="64-true", limit_val_batches=0)
    trainer = quiet(root, rounds, RoundCheckpoint(every_seconds=0), *callbacks, **arguments)
    algorithm = Noted(problem.network(START), lr=0.1, batch_size=None, loss=HalfSquaredError())
    loop = FederatedLoop(problem.datamodule, trace=TRACE, clients_at_once=at_once)
    trainer.fit(algorithm, datamodule=loop, ckpt_path=ckpt_path)
    return trainer.run_dir


def read(path):
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


@pytest.mark.parametrize("at_once", [None, 1, 2])
def test_rows_of_all_rounds_in_order(tmp_path, problem, at_once):
    """Behind the round, counted as in metrics.csv; by round, then by the columns from left to
    right, however the clients were put together."""
    history = Locals(problem, START)
    folder = train(tmp_path, problem, 6, history, at_once=at_once)
    head, rows = read(folder / "norms.csv")
    assert head == ["round", "client", "sum", "samples"]
    assert [(int(r), int(i)) for r, i, *_ in rows] == [
        (t + 1, i) for t, cohort in enumerate(TRACE) for i in cohort
    ]
    for r, i, total, samples in rows:
        expected = history.sums(int(r) - 1)[int(i)]
        assert float(total) == pytest.approx(expected, abs=1e-12)
        assert samples == str(SIZES[int(i)])  # a whole number stays one
    head, rows = read(folder / "pairs.csv")
    assert head == ["round", "client", "partner", "weight"]
    assert [tuple(map(int, row[:3])) for row in rows] == [
        (t + 1, i, j) for t, cohort in enumerate(TRACE) for i in cohort for j in range(i)
    ]
    assert [float(row[3]) for row in rows] == [1 / (1 + int(i) + int(j)) for _, i, j, _ in rows]
    assert not (folder / "empty.csv").exists()
    with (folder / "metrics.csv").open(newline="") as file:
        assert [int(row["round"]) for row in csv.DictReader(file)] == [1, 2, 3, 4, 5, 6]


FILES = ("norms.csv", "pairs.csv", "metrics.csv")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, problem):
    """The folder of an uninterrupted run."""
    return train(tmp_path_factory.mktemp("straight"), problem, 6)


def assert_same_files(folder, expected):
    for name in FILES:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_a_resumed_run_writes_on(tmp_path, problem, straight, rounds):
    """Also after a round that had nothing to record."""
    folder = train(tmp_path, problem, rounds)
    train(tmp_path, problem, 6, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert_same_files(folder, straight)


def test_an_older_checkpoint_cuts_what_came_after(tmp_path, problem, straight):
    folder = train(tmp_path, problem, 2)
    older = folder / "checkpoints" / "second.ckpt"
    shutil.copy(folder / "checkpoints" / "last.ckpt", older)
    train(tmp_path, problem, 6, ckpt_path=folder / "checkpoints" / "last.ckpt")
    train(tmp_path, problem, 4, ckpt_path=older)
    for name in FILES:
        lines = (straight / name).read_bytes().splitlines(keepends=True)
        kept = [line for line in lines[1:] if int(line.split(b",")[0]) <= 4]
        assert (folder / name).read_bytes() == b"".join([lines[0], *kept]), name


class Break(pl.Callback):
    """Breaks off before the next checkpoint, with the round's rows already written."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 3:
            raise RuntimeError("disk full")


def test_an_interrupted_run_has_no_row_twice(tmp_path, problem, straight):
    with pytest.raises(RuntimeError, match="disk full"):
        train(tmp_path, problem, 6, Break())
    folder = tmp_path / "run"
    train(tmp_path, problem, 6, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert_same_files(folder, straight)


@pytest.mark.parametrize("tail", ["4,0,0.1234,7\r\n4,2,", "1", "4,0,1.5,7\r\n1,"])
def test_half_a_row_of_a_killed_run_is_cut(tmp_path, problem, straight, tail):
    """The rest of a row that begins with a 1 could be that of a later round, such as 12."""
    folder = train(tmp_path, problem, 2)
    with (folder / "norms.csv").open("a", newline="") as file:
        file.write(tail)
    train(tmp_path, problem, 6, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert_same_files(folder, straight)


def test_a_finished_run_stays_as_it_is(tmp_path, problem):
    folder = train(tmp_path, problem, 3)
    before = {name: (folder / name).read_bytes() for name in FILES}
    train(tmp_path, problem, 3, ckpt_path=folder / "checkpoints" / "last.ckpt")
    assert {name: (folder / name).read_bytes() for name in FILES} == before


def test_runs_do_not_share_tables(tmp_path, problem):
    """A second run of the same name has a folder, and files, of its own."""
    folders = [train(tmp_path, problem, 2) for _ in range(2)]
    assert folders[0] != folders[1]
    assert_same_files(*folders)
