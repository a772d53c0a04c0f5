"""The published data: long files are compressed, every digest holds, and all read them by name."""

import gzip
import hashlib
import subprocess

import pytest

from benchmarks import published
from tests.commands import ROOT


def tracked(*patterns):
    """Returns the paths of files that Git has, or that lie there without being ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("this folder is no checkout of Git")
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).exists()]


def test_no_plain_csv_file_is_long():
    lengths = {path: path.read_bytes().count(b"\n") for path in tracked("*.csv")}
    assert [path for path, length in lengths.items() if length > 500] == []
    assert len(lengths) > 30


def test_every_compressed_file_has_its_digest():
    digests = {}
    for path in published.DATA.rglob("*.gz"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        digests[path.relative_to(published.DATA).as_posix()] = digest
    assert published.digests() == digests
    assert len(digests) > 30


def test_a_long_file_is_read_by_the_name_of_a_short_one(tmp_path):
    short = [{"run": "FedAvg, tuned", "round": 3, "loss": None}]
    long = [{"run": "FedAvg", "round": number} for number in range(500)]  # and the line of names
    published.publish("short", short, tmp_path)
    published.publish("results/long", long, tmp_path)
    assert published.names(tmp_path) == ["results/long", "short"]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["long.csv.gz", "short.csv"]
    expected = {"run": "FedAvg, tuned", "round": "3", "loss": ""}
    assert published.rows("short", tmp_path) == [expected]
    assert [row["round"] for row in published.rows("results/long", tmp_path)] == [
        str(number) for number in range(500)
    ]
    first = (tmp_path / "results" / "long.csv.gz").read_bytes()
    published.publish("results/long", long, tmp_path)
    assert (tmp_path / "results" / "long.csv.gz").read_bytes() == first
    published.publish("results/long", long[:3], tmp_path)  # it is short now
    assert published.digests(tmp_path) == {}
    assert len(published.rows("results/long", tmp_path)) == 3


def test_a_changed_file_is_refused(tmp_path):
    published.publish("long", [{"round": number} for number in range(501)], tmp_path)
    (tmp_path / "long.csv.gz").write_bytes(gzip.compress(b"round\n1\n"))
    with pytest.raises(ValueError, match=r"long\.csv\.gz: its SHA-256"):
        published.rows("long", tmp_path)
