"""Texts as numbers of tokens."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from ..errors import ConfigError, error_line


def tokens_of(
    column: str, texts: Sequence[str], tokenizer: str | Callable[[str], list[int]], length: int
) -> tuple[np.ndarray, str]:
    """Returns the tokens of texts, int64 [N, length], and a line that says what they are.

    Args:
        column: The name of the texts, for the line.
        texts: The texts.
        tokenizer: As of `HuggingFaceDataModule`.
        length: Tokens of a text.

    Example:
        >>> tokens, line = tokens_of("mail", ["Hé", "Hello"], "bytes", 4)
        >>> tokens.tolist()
        [[73, 196, 170, 0], [73, 102, 109, 109]]
        >>> line  # doctest: +NORMALIZE_WHITESPACE
        "'mail': texts become 4 whole numbers, the bytes in UTF-8 plus 1; longer ones are cut, 1 of
        2, and 0 follows shorter ones"
    """
    encode = encoder(tokenizer, length)
    tokens = np.array([encode(text) for text in texts], np.int64).reshape(len(texts), length)
    said = f"{column!r}: texts become {length} whole numbers, {numbers_of(tokenizer)}"
    said += "; longer ones are cut"
    if tokenizer == "bytes":
        cut = sum(len(text.encode()) > length for text in texts)
        said += f", {cut:,} of {len(texts):,}, and 0 follows shorter ones"
    return tokens, said


def numbers_of(tokenizer: str | Callable[[str], list[int]]) -> str:
    """Returns in words which numbers `encoder` makes of a text."""
    tokenizer = _function_of(tokenizer)
    if callable(tokenizer):
        name = getattr(tokenizer, "__name__", type(tokenizer).__name__)
        return f"as {name} gives them"
    if tokenizer == "bytes":
        return "the bytes in UTF-8 plus 1"
    return f"the tokens of {tokenizer}"


def encoder(
    tokenizer: str | Callable[[str], list[int]], length: int | None
) -> Callable[[str], list[int]]:
    """Returns a function from a text to `length` whole numbers; see `HuggingFaceDataModule`.

    Without a length they are the text's own tokens, without padding and special tokens.

    Example:
        >>> encoder("bytes", 4)("Hé")  # é has two bytes
        [73, 196, 170, 0]
    """
    tokenizer = _function_of(tokenizer)
    if isinstance(tokenizer, str) and tokenizer != "bytes":
        return _hub_encoder(tokenizer, length)

    def encode(text: str) -> list[int]:
        if callable(tokenizer):
            found = list(tokenizer(text))[:length]
        else:
            found = [byte + 1 for byte in text.encode()][:length]
        return found + [0] * ((length or 0) - len(found))

    return encode


def _function_of(
    tokenizer: str | Callable[[str], list[int]],
) -> str | Callable[[str], list[int]]:
    """Returns the function that a path such as `mine.words` names; else the tokenizer itself.

    Raises:
        ConfigError: There is neither such a function nor such a file.
    """
    if not isinstance(tokenizer, str) or Path(tokenizer).is_file():
        return tokenizer
    parts = tokenizer.split(".")
    if len(parts) == 1 or not all(part.isidentifier() for part in parts):
        return tokenizer
    why = "it is no function"
    try:
        found = resolve_name(tokenizer)
        if callable(found):
            return found
    except (ImportError, AttributeError) as error:
        why = error_line(error)
    raise ConfigError(
        f"tokenizer: {tokenizer!r}; there is neither such a file here nor such a function ({why})"
    )


def _hub_encoder(name: str, length: int | None) -> Callable[[str], list[int]]:
    """Returns a function from a text to `length` tokens of the package `tokenizers`."""
    package, _, below = name.partition("/")  # a file in an installed package
    if below and package.isidentifier() and (spec := find_spec(package)) is not None:
        name = str(Path(spec.origin or "").parent / below)
    try:
        from tokenizers import Tokenizer

        if Path(name).is_file():
            known = Tokenizer.from_file(name)
        else:
            known = Tokenizer.from_pretrained(name)
    except Exception as error:  # the package and the hub's client raise many types
        raise ConfigError(
            f"tokenizer: {name!r} cannot be loaded ({error_line(error)}); it "
            "must be bytes, a function, a tokenizer.json, or a tokenizer of huggingface.co, for "
            "which the package tokenizers must be installed, by: pip install tokenizers"
        ) from error
    if length is None:
        return lambda text: known.encode(text, add_special_tokens=False).ids
    known.enable_truncation(length)
    padding = next(filter(None, map(known.token_to_id, ("[PAD]", "<pad>"))), 0)
    known.enable_padding(length=length, pad_id=padding)
    return lambda text: known.encode(text).ids
