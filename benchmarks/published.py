"""The published data of docs/data: reads a file, writes one, and packs the long ones.

    python -m benchmarks.published    # packs what was copied to docs/data, and writes the digests

A file of at most 500 lines lies there as CSV. A longer one is compressed, `NAME.csv.gz`, and its
SHA-256 stands in docs/data/SHA256SUMS (`cd docs/data && sha256sum -c SHA256SUMS`). Programs and
tests read both by the same name, such as "results/fedclup-rounds".
"""

import csv
import gzip
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfl.files import write, write_records

DATA = Path(__file__).parents[1] / "docs" / "data"
SUMS = "SHA256SUMS"
MOST_LINES = 500  # of a file that is not compressed


def names(folder: Path = DATA) -> list[str]:
    """Returns the names of all published files, without their endings."""
    paths = [*folder.rglob("*.csv"), *folder.rglob("*.csv.gz")]
    return sorted({path.relative_to(folder).as_posix().partition(".csv")[0] for path in paths})


def rows(name: str, folder: Path = DATA) -> list[dict[str, str]]:
    """Returns the rows of a published file, by the names of its columns."""
    plain = folder / f"{name}.csv"
    packed = folder / f"{name}.csv.gz"
    if plain.exists():
        text = plain.read_text()
    else:
        content = packed.read_bytes()
        expected = digests(folder).get(f"{name}.csv.gz")
        if hashlib.sha256(content).hexdigest() != expected:
            raise ValueError(f"{packed}: its SHA-256 is not the one in {folder / SUMS}")
        text = gzip.decompress(content).decode()
    return list(csv.DictReader(io.StringIO(text)))


def digests(folder: Path = DATA) -> dict[str, str]:
    """Returns the SHA-256 of each compressed file, by its path in the folder."""
    found = {}
    for line in (folder / SUMS).read_text().splitlines():
        digest, _, path = line.partition("  ")
        found[path] = digest
    return found


def publish(name: str, records: Sequence[Mapping[str, Any]], folder: Path = DATA) -> None:
    """Writes the rows of a published file, and compresses them if they are many."""
    path = folder / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, records)
    pack(folder)


def pack(folder: Path = DATA) -> None:
    """Compresses the files above 500 lines, and writes the digests of all compressed files.

    A plain file replaces the compressed one of its name.
    """
    for plain in sorted(folder.rglob("*.csv")):
        packed = plain.with_name(f"{plain.name}.gz")
        content = plain.read_bytes()
        if content.count(b"\n") > MOST_LINES:
            write(packed, compressed(content))
            plain.unlink()
        else:
            packed.unlink(missing_ok=True)
    lines = []
    for packed in sorted(folder.rglob("*.csv.gz")):
        digest = hashlib.sha256(packed.read_bytes()).hexdigest()
        lines.append(f"{digest}  {packed.relative_to(folder).as_posix()}\n")
    write(folder / SUMS, "".join(lines))


def compressed(content: bytes) -> bytes:
    """Returns the content as a gzip file; equal contents give equal files."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=buffer, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


if __name__ == "__main__":
    pack()
