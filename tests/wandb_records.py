"""The file of an offline W&B run, read as it is."""

import contextlib
import json
import struct

import wandb
from wandb.proto import wandb_internal_pb2

from tests.commands import elsewhere


def read_records(path):
    """Yields the records of a `.wandb` file: protobuf messages after a header.

    The format is LevelDB's log format. Blocks of 32 KiB hold fragments: checksum (4 bytes), length
    (2), type (1), data; a fragment is whole (1) or the first (2), a middle (3) or the last (4)
    part of a record.
    """
    data, block, place, parts = path.read_bytes(), 32768, 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if kind == 0:
            break
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def values(items):
    """Returns items with nested keys as nested dicts."""
    result: dict = {}
    for item in items:
        *path, last = item.nested_key or [item.key]
        inner = result
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = json.loads(item.value_json)
    return result


@contextlib.contextmanager
def offline(root, cwd, make):
    """Runs the commands of the block without an account, with the files of W&B under `root`."""
    with elsewhere(cwd) as patch:
        patch.setenv("WANDB_MODE", "offline")
        for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(make(name)))
        try:
            yield
        finally:
            wandb.finish()
            wandb.teardown()  # the file is whole when the process that writes it has ended


def rows_of(records):
    """Returns the logged rows, each a dict by name."""
    kinds = ((record, record.WhichOneof("record_type")) for record in records)
    return [values(record.history.item) for record, kind in kinds if kind == "history"]
