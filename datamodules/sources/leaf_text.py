"""LEAF's data sets of text: the next character of Shakespeare's plays, the mood of tweets."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, error_line, require_value
from ..ranges import Count, as_int
from .leaf import LeafDataModule

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare, in the order of their numbers."""

_NUMBERS = {letter: number for number, letter in enumerate(ALPHABET)}


class ShakespeareDataModule(LeafDataModule):
    """Shakespeare: 80 characters of a role's lines [80], and the next character as the class.

    McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep
    Networks from Decentralized Data", AISTATS 2017, as in LEAF: 660 roles with more than 80
    characters. Inputs are the numbers of characters in `ALPHABET`, int32, for an embedding of 80
    entries; there are 80 classes. A character outside of the alphabet gets the number of "}".

    Neighbouring samples share 79 characters. LEAF's own split, `OfficialSplit`, leaves a gap
    between training and test samples; `SplitOwn` does not.

    Example:
        >>> ShakespeareDataModule(root="~/leaf", min_samples=64, num_clients=100).command
        './preprocess.sh -s niid --sf 1.0 -k 0 -t sample -tf 0.8'
    """

    leaf_name = "shakespeare"
    command = "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample -tf 0.8"

    def inputs(self, rows: list) -> np.ndarray:
        if {len(row) for row in rows} - {80}:
            raise ValueError("an input has not 80 characters")
        return _numbers("".join(rows)).astype(np.int32).reshape(-1, 80)

    def targets(self, values: list) -> np.ndarray:
        return _numbers("".join(values))


class Sent140DataModule(LeafDataModule):
    """Sent140: tweets as numbers of words [length], with the mood as the class (1: positive).

    Go, Bhayani, Huang, "Twitter Sentiment Classification using Distant Supervision", 2009, as in
    LEAF: 1,600,498 tweets of 660,120 users. A tweet is cut into words of letters, digits and
    apostrophes, and the marks .,!?; (as in LEAF, upper and lower case differ). Words are numbered
    by a vocabulary of V words; all others, and the places after the end of a short tweet, have the
    number V. Inputs are int32, for an embedding of V + 1 entries.

    The vocabulary is that of a file of word vectors, in the order of the file. Without one it is
    that of the training tweets, the most frequent word first (of equally frequent words the one
    that is first in the order of characters).

    Args:
        embeddings: A file of word vectors: GloVe's `.txt`, with a word and its vector in each line,
            or LEAF's `embs.json`. None makes a vocabulary of the training tweets.
        vocabulary_size: The largest V; words at the end of the vocabulary are left out. None takes
            all words.
        length: Words of a tweet; further words are left out.

    Attributes:
        vocabulary: The V words; known after `setup`.
        vectors: The word vectors, float32 [V + 1, D], of which the last one is 0, for
            `torch.nn.Embedding.from_pretrained`; None without a file. Known after `setup`.

    Example:
        >>> from pfl.datamodules.sources.leaf_text import words
        >>> data = Sent140DataModule(root="~/leaf", vocabulary_size=10_000)
        >>> words("Lyx isn't cool, is it?")
        ['Lyx', "isn't", 'cool', ',', 'is', 'it', '?']
    """

    leaf_name = "sent140"

    def __init__(
        self,
        embeddings: str | os.PathLike | None = None,
        vocabulary_size: Count | None = None,
        length: Count = 25,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.embeddings = None
        if embeddings is not None:
            self.embeddings = Path(embeddings).expanduser()
            key = "Sent140DataModule.embeddings"
            suffix = self.embeddings.suffix
            holds = self.embeddings.is_file() and suffix in (".txt", ".json")
            expected = (
                "an existing file: glove.6B.300d.txt of nlp.stanford.edu/data/glove.6B.zip, or the "
                "embs.json that LEAF's models/sent140/get_embs.sh writes"
            )
            require_value(key, str(embeddings), holds, expected)
        self.vocabulary_size = as_int(vocabulary_size)
        self.length = int(length)
        self.vocabulary: list[str] = []
        self.vectors: Tensor | None = None

    def inputs(self, rows: list) -> np.ndarray:
        # A row is: id, date, query, user and text of a tweet.
        return np.array([row[4] for row in rows], object)

    def encode(self, parts: list[np.ndarray]) -> np.ndarray:
        if self.embeddings is None:
            counts = Counter(word for text in parts[0] for word in words(text))
            by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
            self.vocabulary = by_frequency[: self.vocabulary_size]
        else:
            self.vocabulary, self.vectors = read_vectors(self.embeddings, self.vocabulary_size)
        numbers = {word: number for number, word in enumerate(self.vocabulary)}
        unknown = len(self.vocabulary)
        tweets = np.concatenate(parts)
        rows = np.full((len(tweets), self.length), unknown, np.int32)
        for row, text in zip(rows, tweets, strict=True):
            found = [numbers.get(word, unknown) for word in words(text)[: self.length]]
            row[: len(found)] = found
        return rows


def words(text: str) -> list[str]:
    """Cuts a text into words of letters, digits, underscores and apostrophes, and marks .,!?;."""
    return re.findall(r"[\w']+|[.,!?;]", text)


def read_vectors(path: Path, limit: int | None = None) -> tuple[list[str], Tensor]:
    """Reads the first V words, at most `limit`, and vectors float32 [V + 1, D]; the last one is 0.

    The file is GloVe's `.txt`, or the `.json` that LEAF makes of it.
    """
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            vocabulary = [str(word) for word in content["vocab"]]
            rows = content["emba"][: len(vocabulary)]
        else:
            lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")[:limit]
            vocabulary = [line.split(" ", 1)[0] for line in lines]
            rows = [np.array(line.split(" ")[1:], np.float32) for line in lines]
        vectors = np.array(rows[:limit], np.float32)
        vocabulary = vocabulary[:limit]
        if vectors.ndim != 2 or len(vectors) != len(vocabulary):
            raise ValueError("the numbers of words and vectors differ")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Sent140DataModule.embeddings: {str(path)!r} cannot be read ({error_line(error)}); it "
            "must hold a vector for each word"
        ) from error
    return vocabulary, torch.from_numpy(np.pad(vectors, ((0, 1), (0, 0))))


def _numbers(text: str) -> np.ndarray:
    last = len(ALPHABET) - 1
    return np.fromiter((_NUMBERS.get(letter, last) for letter in text), np.int64, len(text))
