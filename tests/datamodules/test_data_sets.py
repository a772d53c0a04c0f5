"""The data modules of digits and of a user's own arrays, and their configuration by YAML."""

import jsonargparse
import numpy as np
import pytest
import torch

from datamodules import (
    IID,
    ArrayDataModule,
    ByValue,
    ClassesPerClient,
    DigitsDataModule,
    Dirichlet,
    FederatedDataModule,
    LabelDistribution,
    LogNormal,
    MatchLabels,
    Natural,
    Shards,
    SharedTest,
    Sizes,
    TensorDataModule,
    Within,
)
from models import MLP
from pfl.algorithms import FedAvg
from tests.problems import run


def test_digits_are_scaled_images_of_ten_classes():
    dm = DigitsDataModule()
    x, y = dm.samples.gather(torch.arange(1797))
    assert len(dm.samples) == 1797
    assert x.shape == (1797, 1, 8, 8)
    assert x.dtype == torch.float32
    assert (x.min(), x.max()) == (0, 1)
    assert y.dtype == torch.int64
    assert (dm.num_classes, dm.num_clients, dm.input_shape) == (10, 20, (1, 8, 8))
    assert isinstance(dm.partitioner, Dirichlet)
    assert dm.partitioner.alpha == 0.1


def test_digits_test_set_is_a_fifth_of_each_class():
    from sklearn.datasets import load_digits

    dm = DigitsDataModule(1, IID(), SharedTest(validation=0.0))
    train, test = dm.label_counts("train")[0], dm.label_counts("test")[0]
    per_class = np.bincount(load_digits().target)
    assert (train + test == per_class).all()
    assert (test == per_class // 5).all()
    # Every image occurs once: the two sorted lists of images are equal.
    x = dm.samples.gather(torch.arange(1797))[0].flatten(1).numpy() * 16
    assert sorted(map(bytes, x.astype(np.uint8))) == sorted(
        map(bytes, load_digits().data.astype(np.uint8))
    )


X = np.arange(80, dtype=np.float64).reshape(40, 2)
Y = np.arange(40) % 4


def test_arrays_become_tensors_of_standard_types():
    dm = ArrayDataModule(X, Y.astype(np.uint16), num_clients=4, partition=IID())
    x, y = dm.samples.gather(torch.tensor([3]))
    assert x.dtype == torch.float32
    assert (x.tolist(), y.tolist()) == ([[6.0, 7.0]], [3])
    assert y.dtype == torch.int64
    pixels = (X / X.max() * 255).astype(np.uint8).reshape(40, 1, 2)
    images = ArrayDataModule(pixels, Y, num_clients=4)
    assert images.samples.nbytes == 80 + 40 * 8
    assert images.samples.gather(torch.tensor([39]))[0].max() == 1
    regression = ArrayDataModule(X, Y / 2, num_clients=4)
    assert regression.num_classes is None
    assert regression.samples.targets.dtype == torch.float32


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_run_on_a_table_of_uint8_is_that_on_its_numbers(engine, tmp_path):
    ages = np.random.default_rng(0).integers(0, 100, (40, 4))
    rows = []
    for kind in (np.uint8, np.float32):
        data = TensorDataModule(ages.astype(kind), Y % 3, num_clients=4, batch_size=3)
        torch.manual_seed(0)
        method = FedAvg(MLP(4, (5,), 3), lr=1e-3, engine=engine)
        trained = run(method, data, 2, root=tmp_path, precision="32-true")
        rows.append(trained.trainer.recorder.rows)
    assert len(rows[0]) == 2 and rows[0] == rows[1]


@pytest.mark.parametrize("kind", [TensorDataModule, ArrayDataModule])
def test_whether_uint8_is_scaled_is_told(kind):
    """The same numbers as a table of four columns and as images of 2 x 2 pixels."""
    numbers = np.arange(160).astype(np.uint8)
    table = kind(numbers.reshape(40, 4), Y, num_clients=4)
    assert table.samples.gather(torch.tensor([39]))[0].tolist() == [[156, 157, 158, 159]]
    assert table.describe().endswith("seed 0; uint8 inputs of a table, not divided by 255.")
    images = kind(numbers.reshape(40, 2, 2), Y, num_clients=4)
    assert images.samples.gather(torch.tensor([39]))[0].max() == np.float32(159) / 255
    assert images.describe().endswith("uint8 inputs of the shape of images, divided by 255.")
    assert "uint8" not in kind(numbers.reshape(40, 4) / 1.0, Y, num_clients=4).describe()
    flat = kind(np.zeros((40, 64), np.uint8), Y, num_clients=4)  # perhaps images of 8 x 8 pixels
    with pytest.warns(
        UserWarning, match=r"uint8 \[N, 64\], are taken for a table, .*\[N, C, H, W\]"
    ):
        flat.setup()


@pytest.mark.parametrize("kind", [">f4", ">f8", ">f2", "longdouble", ">i4", ">u2", "<u2"])
def test_arrays_of_any_number_type_and_byte_order_are_read(kind, tmp_path):
    np.savez(tmp_path / "mine.npz", inputs=X.astype(kind), targets=Y.astype(">i8"))
    x, y = ArrayDataModule(file=tmp_path / "mine.npz", num_clients=4).samples.gather(
        torch.arange(40)
    )
    assert (x.tolist(), y.tolist()) == (X.tolist(), Y.tolist())


def test_arrays_of_objects_are_named(one_line, tmp_path):
    """As `frame["hospital"].to_numpy()` gives text."""
    path, ids = tmp_path / "mine.npz", np.array(["north", "south"] * 20, object)
    np.savez(path, inputs=X, targets=Y, client_ids=ids)
    told = "the array client_ids is of Python objects", "saved as np.array(client_ids, str)"
    with one_line("ArrayDataModule.file: ", *told):
        ArrayDataModule(file=path, partition=Natural()).setup()
    pandas = pytest.importorskip("pandas")
    for column in (ids, pandas.Series(ids), pandas.Series(ids, dtype="category")):
        np.savez(path, inputs=X, targets=Y, client_ids=np.array(column, str))
        assert ArrayDataModule(file=path).client_names == ["north", "south"]
    np.savez(path, inputs=X.astype(object), targets=Y)
    told = "the array inputs is of Python objects", 'saved as np.array(inputs, "float32")'
    with one_line("ArrayDataModule.file: ", *told):
        ArrayDataModule(file=path, num_clients=2).setup()


def test_each_id_is_a_client_unless_another_rule_is_given(one_line, tmp_path):
    path = tmp_path / "mine.npz"
    ids = np.array(["north", "south"] * 20)
    np.savez(path, inputs=X, targets=Y, client_ids=ids)
    for kind, given in (
        (TensorDataModule, {"inputs": X, "targets": Y, "client_ids": ids}),
        (ArrayDataModule, {"inputs": X, "targets": Y, "client_ids": ids}),
        (ArrayDataModule, {"file": path}),
    ):
        assert kind(**given).client_names == ["north", "south"]
        assert kind(**given, num_clients=4).client_names is None  # at random
        assert kind(**given, partition=Natural(), num_clients=1).client_names == ["north"]
    np.savez(path, inputs=X, targets=Y)
    with one_line("ArrayDataModule.num_clients: None; it must be a whole number"):
        ArrayDataModule(file=path)


def test_wrong_arrays_and_files_are_refused(one_line, tmp_path):
    with one_line("ArrayDataModule.targets: None; it must be an array"):
        ArrayDataModule(X, num_clients=2)
    with one_line("test_targets: None; it must be given, as test_inputs is"):
        ArrayDataModule(X, Y, X, num_clients=2)
    with one_line("TensorSamples.targets.shape: (3,); it must be (40, ...)"):
        ArrayDataModule(X, Y[:3], num_clients=2)
    with one_line("ArrayDataModule.inputs.dtype: dtype('<U32'); it must be a type of numbers"):
        ArrayDataModule(X.astype(str), Y, num_clients=2)
    with one_line("ArrayDataModule.file: 'a.npz'; it must be None, as inputs, targets are given"):
        ArrayDataModule(X, Y, file="a.npz", num_clients=2)
    with one_line("ArrayDataModule.file: ", "nowhere.npz'; it must be the path of an existing"):
        ArrayDataModule(file=tmp_path / "nowhere.npz", num_clients=2)
    (tmp_path / "text.npz").write_text("inputs: 3")
    with one_line("ArrayDataModule.file: ", "text.npz'; it must be an .npz file"):
        ArrayDataModule(file=tmp_path / "text.npz", num_clients=2).setup()
    np.savez(tmp_path / "half.npz", inputs=X)
    with one_line("ArrayDataModule.targets: None; it must be an array in ", "half.npz"):
        ArrayDataModule(file=tmp_path / "half.npz", num_clients=2).setup()
    np.savez(tmp_path / "more.npz", inputs=X, targets=Y, label=Y)
    with one_line("more.npz' holds label", "client_ids"):
        ArrayDataModule(file=tmp_path / "more.npz", num_clients=2).setup()
    np.savez(tmp_path / "objects.npz", inputs=np.array([{}, []], object), targets=Y)
    with one_line("objects.npz': the array inputs is of Python objects"):
        ArrayDataModule(file=tmp_path / "objects.npz", num_clients=2).setup()


@pytest.mark.parametrize("in_file", [True, False])
def test_arrays_that_lose_digits_are_named(tmp_path, in_file):
    """80 numbers below 2^24 fit into float32, and so do halves; a tenth does not."""
    arrays = {"inputs": X + 0.1, "targets": Y / 2, "test_inputs": X, "test_targets": Y / 10}
    np.savez(tmp_path / "mine.npz", **arrays)
    given = {"file": tmp_path / "mine.npz"} if in_file else arrays
    dm = ArrayDataModule(**given, num_clients=2, partition=IID())
    dm.setup()
    assert dm.rounded_arrays == ["inputs", "test_targets"]


def test_a_tilde_in_the_path_of_a_file_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "mine.npz", inputs=X, targets=Y)
    assert len(ArrayDataModule(file="~/mine.npz", num_clients=2).samples) == len(X)


def from_yaml(text):
    """Builds a data module from YAML, as a Lightning command line does."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedDataModule, "data")
    return parser.instantiate(parser.parse_string(text)).data


def test_yaml_can_describe_a_file_a_rule_and_a_protocol(tmp_path):
    ids = np.array(["ann", "bob"])[np.arange(40) % 2]
    np.savez(
        tmp_path / "mine.npz", inputs=X, targets=Y, test_inputs=X, test_targets=Y, client_ids=ids
    )
    dm = from_yaml(f"""
data:
  class_path: ArrayDataModule
  init_args:
    file: {tmp_path / "mine.npz"}
    partition: Natural
    protocol: {{class_path: MatchLabels, init_args: {{samples: 8}}}}
""")
    assert isinstance(dm.partitioner, Natural)
    assert isinstance(dm.protocol, MatchLabels)
    assert dm.num_clients == 2
    assert dm.partition.test.sizes.tolist() == [8, 8]
    # Ann holds the even samples, of labels 0 and 2.
    assert (dm.label_counts("test") > 0).tolist() == [[True, False] * 2, [False, True] * 2]


def test_yaml_can_list_client_ids(tmp_path):
    np.savez(tmp_path / "mine.npz", inputs=X[:6], targets=Y[:6])
    dm = from_yaml(f"""
data:
  class_path: ArrayDataModule
  init_args:
    file: {tmp_path / "mine.npz"}
    partition: {{class_path: Natural, init_args: {{client_ids: [a, b, a, b, b, b]}}}}
    protocol: {{class_path: SplitOwn, init_args: {{test: 0, validation: 0}}}}
""")
    assert [dm.partition.train[i].tolist() for i in range(2)] == [[0, 2], [1, 3, 4, 5]]


@pytest.mark.parametrize(
    ("rule", "built"),
    [
        (
            "{class_path: Dirichlet, init_args: {alpha: 0.5, over: labels, equal_sizes: true}}",
            Dirichlet(0.5, over="labels", equal_sizes=True),
        ),
        ("{class_path: ClassesPerClient, init_args: {classes: 3}}", ClassesPerClient(3)),
        ("{class_path: Shards, init_args: {shards_per_client: 3}}", Shards(3)),
        ("{class_path: LogNormal, init_args: {sigma: 0.4}}", LogNormal(0.4)),
        ("{class_path: Sizes, init_args: {sizes: [300, 200, 100]}}", Sizes([300, 200, 100])),
        ("ByValue", ByValue()),
        (
            "{class_path: LabelDistribution, init_args: {distribution: "
            "[[1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 2, 2, 2, 2, 2.5], "
            "[0, 1, 0, 1, 0, 1, 0, 1, 0, 1]], size: 50}}",
            LabelDistribution(
                [[1.0] * 5 + [0.0] * 5, [0.0] * 5 + [2.0] * 4 + [2.5], [0.0, 1.0] * 5], size=50
            ),
        ),
        (
            "{class_path: Within, init_args: {outer: {class_path: Dirichlet, init_args: "
            "{alpha: 3.0}}, inner: IID, groups: 2}}",
            Within(Dirichlet(3.0), IID(), groups=2),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_yaml_can_describe_every_rule(rule, built):
    arguments = f"{{num_clients: 3, partition: {rule}}}"
    dm = from_yaml(f"data: {{class_path: DigitsDataModule, init_args: {arguments}}}")
    assert repr(dm.partitioner) == repr(built)
    assert len(dm.partition) == 3


def test_yaml_can_name_a_column_and_a_file(tmp_path):
    text = """
data:
  class_path: DigitDomainsDataModule
  init_args:
    num_clients: {}
    partition:
      class_path: {}
      init_args: {}
"""
    within = "{outer: {class_path: Natural, init_args: {client_ids: domain}}, inner: IID}"
    dm = from_yaml(text.format(4, "Within", within))
    assert repr(dm.partitioner) == repr(Within(Natural("domain"), IID()))
    dm.partition.save(tmp_path / "p.npz")
    again = from_yaml(text.format("null", "Given", f"{{file: {tmp_path / 'p.npz'}}}"))
    assert again.partition.hash == dm.partition.hash
