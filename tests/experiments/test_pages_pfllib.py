"""The numbers of docs/record/pfllib.md are those of its published data."""

import pytest

from benchmarks import pfllib, published
from pfl.report.table import markdown
from tests.experiments.pages import RECORD


@pytest.fixture(scope="module")
def page():
    return (RECORD / "pfllib.md").read_text()


@pytest.fixture(scope="module")
def pooled():
    """The share of test samples that are right, in %, by run and model, and then by round."""
    right: dict[tuple[str, str], dict[int, int]] = {}
    sizes: dict[str, int] = {}
    for row in published.rows(pfllib.DATA):
        rounds = right.setdefault((row["run"], row["model"]), {})
        rounds[int(row["round"])] = rounds.get(int(row["round"]), 0) + int(row["right"])
        sizes[row["client"]] = int(row["samples"])
    assert sum(sizes.values()) == 17_507  # a quarter of each client's samples, of 70,000 in all
    return {
        key: {k: 100 * count / 17_507 for k, count in rounds.items()}
        for key, rounds in right.items()
    }


def test_the_table_is_that_of_the_data(page):
    assert markdown(pfllib.table()) in page


def test_largest_and_last_are_pooled_over_samples(pooled):
    table = {row[0]: row for row in pfllib.table().rows}
    for (run, kind), rounds in pooled.items():
        if kind == "global" and (run, "personalized") in pooled:
            continue
        name = run
        if kind.startswith("finetuned"):
            name = f"{run} + fine-tuning"
        assert table[name][2] == f"{max(rounds.values()):.2f}"
        assert table[name][4] == f"{rounds[max(rounds)]:.2f}"


def test_a_round_chosen_by_other_clients_is_not_the_best_one_by_chance():
    """Even clients are best in the second round, odd ones in the first: each half counts there."""
    right = pfllib.np.array([[1.0, 4.0], [3.0, 2.0]])
    assert pfllib.chosen_by_others(right) == 1.0 + 2.0
    assert right.sum(1).max() == 5.0


def test_the_verdicts_are_those_of_the_data(page, pooled):
    own = {run: rounds for (run, kind), rounds in pooled.items() if kind == "personalized"}
    last = {run: rounds[max(rounds)] for run, rounds in own.items()}
    tuned = pooled["FedAvg", "finetuned/100"][30]
    below = {run: pfllib.PRINTED[run] - last[run] for run in ("FedPer", "FedRep")}
    rise = [own[run][30] - own[run][21] for run in below]
    assert "FedPer {FedPer:.2f} below, FedRep {FedRep:.2f}.".format(**below) in page
    assert "by {:.2f} and {:.2f} points in the last nine rounds".format(*rise) in page
    below = {run: pfllib.PRINTED[run] - pooled[run, "global"][30] for run in ("FedAvg", "FedProx")}
    assert "FedAvg {FedAvg:.2f} below. FedProx {FedProx:.2f} below.".format(**below) in page
    fedgen = pooled["FedGen", "global"][30]
    assert f"nothing was expected, {pfllib.PRINTED['FedGen'] - fedgen:.2f} below. | yes |" in page
    ahead = fedgen - pooled["FedAvg", "global"][30]
    behind = pfllib.PRINTED["FedAvg"] - pfllib.PRINTED["FedGen"]
    text = f"is {ahead:.2f} points ahead of FedAvg after 30 rounds, and {behind:.2f} behind it in"
    assert text in page
    assert f"FedDBE {pfllib.PRINTED['FedDBE'] - last['FedDBE']:.2f} below." in page
    assert f"FedRoD {pfllib.PRINTED['FedRoD'] - max(own['FedRoD'].values()):.2f} below." in page
    apart = pooled["FedRoD", "global"][30]
    text = "FedRoD is {:.2f} points behind clients alone; its global model, which PFLlib does not "
    text += "print, has {:.2f} % in the last round, {:.2f} points more than FedAvg's."
    ahead = apart - pooled["FedAvg", "global"][30]
    assert text.format(last["clients alone"] - max(own["FedRoD"].values()), apart, ahead) in page
    for run in ("FedAMP", "FedBABU", "FedDistill", "FedProto"):
        assert f"{run} {pfllib.PRINTED[run] - last[run]:.2f} below" in page
    for run in ("Ditto", "APFL", "FedALA", "GPFL", "FedFomo", "FedCP"):
        assert f"{run} {pfllib.PRINTED[run] - max(own[run].values()):.2f} below." in page
    behind = last["clients alone"] - last["Ditto"]
    assert f"Ditto is {behind:.2f} points behind clients alone." in page
    behind = last["clients alone"] - last["FedALA"]
    further = last["clients alone"] - last["FedFomo"]
    text = f"FedALA is {behind:.2f} points behind clients alone, and FedFomo {further:.2f}."
    assert text in page
    behind = last["clients alone"] - last["FedCP"]
    risen = own["FedCP"][30] - own["FedCP"][24]
    assert max(pfllib.PRINTED.values()) == pfllib.PRINTED["FedCP"]
    text = f"is {behind:.2f} behind, and still rises: by {risen:.2f} points in the last six rounds."
    assert text in page
    below = {
        run: pfllib.PRINTED[run] - max(own[run].values())
        for run in ("Per-FedAvg", "pFedMe", "GPFL")
    }
    text = "are {Per-FedAvg:.2f} and {pFedMe:.2f} points below the print. GPFL is {GPFL:.2f} below"
    assert text.format(**below) in page
    drop = max(own["GPFL"].values()) - last["GPFL"]
    assert f"its last round is {drop:.2f} points below its best one" in page
    apart = max(abs(own["APFL"][k] - own["clients alone"][k]) for k in own["APFL"])
    assert apart < 0.04 and "all ten evaluations are within 0.04 points" in page
    here = {run: score - last["clients alone"] for run, score in last.items()}
    there = {run: score - pfllib.PRINTED["FedAMP"] for run, score in pfllib.PRINTED.items()}
    text = "{FedProto:.2f} points ahead of clients alone, and FedDistill {FedDistill:.2f};"
    assert text.format(**here) in page
    text = "they are {FedProto:.2f} and {FedDistill:.2f} points ahead of FedAMP,"
    assert text.format(**there) in page
    behind = -here["FedBABU"]
    text = f"{behind:.2f} points behind clients alone here, and {there['FedBABU']:.2f} points ahead"
    assert text in page
    assert f"| {last['FedPer'] - tuned:.2f} behind. | just not |" in page
    assert f"| {last['clients alone'] - last['FedPer']:.2f} points ahead. | no |" in page
    longer = own["clients alone, 100 rounds"]
    best = max(longer.values())
    above = best - pfllib.PRINTED["FedAMP"]
    text = (
        f"{longer[100]:.2f} %, and {best:.2f} % in the best of ten evaluations, {above:.2f} points"
    )
    assert text in page
    text = f"{last['clients alone']:.2f} % after 30 rounds and {longer[100]:.2f} % after 100"
    assert f"{text}, {best:.2f} % in the best round." in page
    personalized = pfllib.PRINTED.keys() - {"FedAvg", "FedProx", "FedGen"}
    assert max(pfllib.PRINTED[run] for run in personalized) < pfllib.PRINTED["FedAMP"] + 1


def test_one_client_makes_the_round_of_the_others_a_bad_one(page):
    rows = [row for row in published.rows(pfllib.DATA) if row["run"] == "FedAMP"]
    one = [row for row in rows if row["client"] == "12"]
    share = {int(row["round"]): 100 * int(row["right"]) / int(row["samples"]) for row in one}
    assert f"has {share[21]:.1f} % in round 21, {share[24]:.1f} % in round 24" in page
    assert f"{share[27]:.1f} % in round 27" in page
    assert f"{int(one[0]['samples']) / 17_507:.3f}" == "0.122"  # an eighth
    odd: dict[int, int] = {}
    for row in rows:
        if int(row["client"]) % 2:
            odd[int(row["round"])] = odd.get(int(row["round"]), 0) + int(row["right"])
    assert max(odd, key=lambda k: odd[k]) == 24


def test_the_code_of_pfllib_learns_as_slowly(page, pooled):
    theirs: dict[str, dict[int, float]] = {}
    for row in published.rows("results/pfllib-fashion/theirs"):
        theirs.setdefault(row["method"], {})[int(row["round"])] = 100 * float(row["accuracy"])
    three, six = (theirs["FedDBE"][round_] for round_ in (3, 6))
    assert f"has {three:.2f} % after three rounds and {six:.2f} % after six" in page
    ours = pooled["FedDBE", "personalized"]
    assert f"ours has {ours[3]:.2f} % and {ours[6]:.2f} %" in page
    fedavg = pooled["FedAvg", "global"]
    assert f"and FedAvg {fedavg[3]:.2f} % and {fedavg[6]:.2f} %" in page
    assert abs(three - ours[3]) < 2 and abs(six - ours[6]) < 2
    ours = pooled["GPFL", "personalized"]
    rounds = (6, 9, 12)
    text = "has {:.2f}, {:.2f} and {:.2f} % after six, nine and twelve rounds, "
    text += "ours {:.2f}, {:.2f} and {:.2f} %"
    scores = [*(theirs["GPFL"][k] for k in rounds), *(ours[k] for k in rounds)]
    assert text.format(*scores) in " ".join(page.split())
