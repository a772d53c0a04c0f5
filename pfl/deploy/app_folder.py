"""The folder that `pfl deploy` writes: which files in it may be replaced, and texts in TOML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pfl import files
from pfl.errors import ConfigError

MARKER = ".pfl-deploy.json"
"""The file that says which files of a folder `pfl deploy` has written."""


def write_folder(out: Path, contents: Mapping[str, str]) -> None:
    """Writes files into a folder that is new, is empty, or was written by this function before.

    `MARKER` has the digest of each text that was written, by the file's name. So a file that came
    from somewhere else, or that a person has changed, is never replaced.

    Args:
        out: The folder.
        contents: The text of each file, by its path in the folder.

    Raises:
        ConfigError: A file would be lost. Nothing has been written then.
    """
    files.make_folder(out, "deploy: --out")
    marker = out / MARKER
    if not marker.is_file() and any(out.iterdir()):
        raise ConfigError(
            f"deploy: --out: {out} has files that pfl deploy has not written; give a new or an "
            f"empty folder"
        )
    written: dict[str, list[str]] = {}
    with files.reading(marker):
        for name, digests in files.read_json(marker).get("files", {}).items():
            written[name] = list(digests)
    for name, text in contents.items():
        path = out / name
        known = written.setdefault(name, [])
        new = _digest(text.encode())
        if new not in known:
            known.append(new)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(f"deploy: --out: {path} is not a file of pfl deploy; move it away")
        if path.is_file() and _digest(path.read_bytes()) not in known:
            raise ConfigError(
                f"deploy: --out: {path} was changed since pfl deploy wrote it; move it away, or "
                f"give a new folder"
            )
    # A command that is killed in between leaves files that the marker knows.
    files.write_json(marker, {"written by": "pfl deploy", "files": written})
    for name, text in contents.items():
        files.make_folder((out / name).parent, "deploy: --out")
        files.write(out / name, text)


def toml_text(text: str) -> str:
    r"""Returns a text in quotes as TOML has it.

    Example:
        >>> print(toml_text('a "b"'))
        "a \"b\""
    """
    # TOML's escapes are those of JSON; TOML has no raw DEL, and no surrogates as JSON's \ud83d.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
