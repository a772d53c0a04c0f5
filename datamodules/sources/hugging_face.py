"""Data sets of the Hugging Face hub, and files that its package `datasets` reads."""

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..base import FederatedDataModule
from ..errors import ConfigError, error_line, optional_module, require_value
from ..ranges import Count, as_int
from ..rules.sample_values import add_rule
from ..samples.images import has_16_bits, pixels_of, read_items
from ..samples.loaded import Loaded
from ..samples.memory_map import train_and_test
from .cells import MISSING, identifiers_of, targets_of
from .tokens import tokens_of

_MISSING_IN_CSV = MISSING | {  # as pandas reads them
    "#N/A N/A", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN", "<NA>", "None",
}  # fmt: skip


class HuggingFaceDataModule(FederatedDataModule):
    """A data set of the Hugging Face hub, a folder of `Dataset.save_to_disk`, or local files.

    The package `datasets` loads it (`pip install datasets`). Inputs are uint8 [N, C, H, W] for a
    column of images, scaled to [0, 1] in each batch (gray images of 16 bits are float32 in [0, 1]);
    the numbers of tokens, int64 [N, length], for text; and float32 or int64 [N, ...] for floating
    or whole numbers, or lists of them. Targets of whole numbers, `ClassLabel`s and booleans are
    classes, as are texts, which are numbered in ascending order; floating numbers mean regression.
    In CSV files ids and classes are read as in `TableDataModule`: 007, 7 and 07 are three clients.

    In a configuration file, LEAF's FEMNIST with a client for each writer:

        data:
          class_path: HuggingFaceDataModule
          init_args:
            path: flwrlabs/femnist
            input_column: image
            target_column: character
            client_column: writer_id

    Args:
        path: The name of a data set; a folder that `save_to_disk` has written; or "parquet", "csv"
            or "json" with `data_files`.
        input_column: The column of the inputs.
        target_column: The column of the targets.
        client_column: The column of the client ids. If neither `partition` nor `num_clients` is
            given, each id is a client, as with `Natural()`.
        name: The configuration of the data set, if it has several.
        data_files: Local files: a path, or paths by split. A path alone is the split "train".
        revision: The version of the data set on the hub: a branch, a tag or a commit.
        train_split: The split of the training samples.
        test_split: The split of the official test samples; None for none.
        image_size: Height and width to which images are resized; None keeps their size.
        image_mode: "L" for one gray channel, "RGB" for three; None takes the one that fits all
            images.
        tokenizer: "bytes" numbers the bytes of a text in UTF-8 from 1 to 256; a function from a
            text to a list of whole numbers (in a configuration file its dotted name); the name of a
            tokenizer of the hub, such as bert-base-uncased; or the path of a `tokenizer.json`. The
            last two need `pip install tokenizers`.
        length: Tokens of a text; further ones are left out. Missing ones are 0, or the padding
            token of the tokenizer.
        cache: A folder for decoded images, which are then mapped from a file into memory, as for
            `ImageFolderDataModule`. None decodes them into memory at each start.
        root: The folder of all data sets; its subfolder `huggingface` holds the converted data.

    Example:
        >>> data = HuggingFaceDataModule("cifar10", "img", "label", num_clients=10)
        >>> data.tokenizer, data.length
        ('bytes', 128)
    """

    tells_scale = True

    def __init__(
        self,
        path: str,
        input_column: str,
        target_column: str,
        client_column: str | None = None,
        name: str | None = None,
        data_files: str | dict[str, str] | None = None,
        revision: str | None = None,
        train_split: str = "train",
        test_split: str | None = None,
        image_size: Count | None = None,
        image_mode: Literal["L", "RGB"] | None = None,
        tokenizer: str | Callable[[str], list[int]] = "bytes",
        length: Count = 128,
        cache: str | os.PathLike | None = None,
        root: str | os.PathLike = "data",
        **kwargs: Any,
    ) -> None:
        add_rule(client_column is not None, kwargs)
        super().__init__(**kwargs)
        self.path = path
        self.configuration = name  # a Lightning data module has a `name` already
        self.data_files = data_files
        self.revision = revision
        self.input_column = input_column
        self.target_column = target_column
        self.client_column = client_column
        self.train_split = train_split
        self.test_split = test_split
        self.image_size = as_int(image_size)
        self.image_mode = image_mode
        self.tokenizer = tokenizer
        self.length = int(length)
        self.cache = None
        if cache is not None:
            self.cache = Path(cache).expanduser()
        self.root = Path(root).expanduser()

    def prepare_data(self) -> None:
        if self.cache is None:
            self._open()
        else:
            self.load()

    def load(self) -> Loaded:
        splits = self._open()
        self.conversions = []
        for column in (self.input_column, self.target_column):
            if "float64" in str(splits[0].features[column]):
                self.conversions.append(f"{column!r}: float64 is read as float32, with 7 digits")
        inputs = self._inputs(splits, self.input_column)
        targets, names = self._classes(splits, self.target_column)
        ids = None
        if self.client_column is not None:
            ids = _client_ids(splits, self.client_column)
            if self.path == "csv":
                ids = identifiers_of(ids.tolist())
        train, test = train_and_test(inputs, targets, len(splits[0]))
        return Loaded(train, test, ids, class_names=names)

    def _open(self) -> list[Any]:
        """Returns the training split, and the test split if there is one."""
        key = f"HuggingFaceDataModule.path: {self.path!r}"
        datasets = optional_module(key, "datasets")
        folder = Path(self.path).expanduser()
        is_folder = folder.is_dir() and self.data_files is None
        given: dict[str, Any] = {"data_files": self.data_files, "revision": self.revision}
        given["cache_dir"] = str(self.root / "huggingface")
        if self.path == "csv":  # pandas would read 007 and 7 as one number
            given["converters"] = {self.target_column: _cell}
            if self.client_column is not None:
                given["converters"][self.client_column] = _cell
            given["converters"].pop(self.input_column, None)
        try:
            with _quiet(datasets, is_local=is_folder or self.data_files is not None):
                if is_folder:
                    found = datasets.load_from_disk(str(folder))
                else:
                    found = datasets.load_dataset(self.path, self.configuration, **given)
        except Exception as error:  # `datasets`, the hub's client and the readers raise many types
            raise ConfigError(
                f"{key} cannot be loaded ({error_line(error)}); it must be the name of a data set "
                "on huggingface.co, a folder of save_to_disk, or parquet, csv or json with "
                "data_files"
            ) from error
        if isinstance(found, datasets.Dataset):  # a single table that save_to_disk has written
            found = {"train": found}
        named = {"train_split": self.train_split, "test_split": self.test_split}
        for argument, split in named.items():
            holds = split is None or split in found
            expected = f"one of {', '.join(found)}"
            require_value(f"HuggingFaceDataModule.{argument}", split, holds, expected)
        splits = [found[split] for split in named.values() if split is not None]
        for argument in ("input_column", "target_column", "client_column"):
            column = getattr(self, argument)
            known = splits
            if argument == "client_column":
                known = splits[:1]  # the test samples may lack client ids; see `_client_ids`
            for split in known:
                names = split.column_names
                expected = f"one of the columns, which are {', '.join(names)}"
                holds = column is None or column in names
                require_value(f"HuggingFaceDataModule.{argument}", column, holds, expected)
        return splits

    def _inputs(self, splits: Sequence[Any], column: str) -> np.ndarray:
        from datasets import Image, Value

        feature = splits[0].features[column]
        if isinstance(feature, Image):
            return self._images([split.select_columns([column]) for split in splits])
        if isinstance(feature, Value) and "string" in feature.dtype:
            texts = [text for s in splits for text in _values(s, column)]
            tokens, said = tokens_of(column, texts, self.tokenizer, self.length)
            self.conversions.append(said)
            return tokens
        return np.concatenate([_numbers("input_column", s, column) for s in splits])

    def _images(self, splits: Sequence[Any]) -> np.ndarray:
        """Returns the images of all splits, which have one column, [N, C, H, W]."""
        from datasets import concatenate_datasets

        table = concatenate_datasets(list(splits))
        mode = self.image_mode
        if mode is None:
            (first,) = table[0].values()
            mode = "RGB"
            if first is not None and _is_gray(first):  # one that is missing is named below
                mode = "L"
        said = f"images are read in the mode {mode}, 8 bits divided by 255 and 16 by 65,535"
        if self.image_size is not None:
            said += f", and resized to {self.image_size}x{self.image_size}"
        self.conversions.append(said)
        strict = self.image_mode is None and mode == "L"
        file = None
        if self.cache is not None:
            key = f"{table._fingerprint} {self.image_size} {mode}, uint8 or 16 bits"
            file = self.cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
        read = functools.partial(_image, table, mode, strict, self.image_size)
        differ = "image_size: None, but the images {} and {} have the shapes {} and {}"
        differ = f"HuggingFaceDataModule.{differ}; it must be given"
        return read_items(read, range(len(table)), differ, file)

    def _classes(self, splits: Sequence[Any], column: str) -> tuple[np.ndarray, list[str] | None]:
        """Returns the targets, classes int64 [N] or floating numbers, and the classes' names."""
        from datasets import ClassLabel, Value

        feature = splits[0].features[column]
        if not isinstance(feature, Value) or "string" not in feature.dtype:
            numbers = np.concatenate([_numbers("target_column", s, column) for s in splits])
            if isinstance(feature, ClassLabel):
                return numbers, list(feature.names)
            return numbers, None
        texts = np.concatenate([_values(s, column, may_be_empty=False) for s in splits])
        if self.path == "csv":
            targets = targets_of(texts.tolist())
            if targets.dtype.kind == "f":
                return targets.astype(np.float32), None
            if targets.dtype.kind in "bi":
                return targets.astype(np.int64), None
        names, classes = np.unique(texts, return_inverse=True)
        return classes.astype(np.int64), names.tolist()


def _image(table: Any, mode: str, strict: bool, size: int | None, number: int) -> np.ndarray:
    """Reads an image of a table with one column, [C, H, W]; if `strict`, a gray one."""
    (image,) = table[number].values()
    if image is None:
        raise ConfigError(
            f"HuggingFaceDataModule.input_column: the row {number} has no image; each row must "
            "have one"
        )
    if strict and not _is_gray(image):
        raise ConfigError(
            "HuggingFaceDataModule.image_mode: None, but there are gray images and images in "
            "colour; it must be L or RGB"
        )
    return pixels_of(image, mode, size, f"HuggingFaceDataModule: the image {number}")


def _is_gray(image: Any) -> bool:
    return image.mode in ("1", "L") or has_16_bits(image)


@contextlib.contextmanager
def _quiet(datasets: Any, is_local: bool) -> Iterator[None]:
    """Keeps `datasets` from logging errors, which are raised as well, and local progress bars."""
    level = datasets.logging.get_verbosity()
    shown = datasets.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")  # tells every retry without a network
    datasets.logging.set_verbosity(logging.CRITICAL)
    hub_level = hub.level
    hub.setLevel(logging.CRITICAL)
    if is_local:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if shown:
            datasets.enable_progress_bars()


def _values(split: Any, column: str, may_be_empty: bool = True) -> np.ndarray:
    """Returns a column [N, ...], without missing values; an empty text may be one."""
    values = split.select_columns([column]).with_format("numpy")[:][column]
    texts = []
    if values.dtype.kind in "OU" and values.ndim == 1:
        texts = values.tolist()
    missing = any(x is None or (not may_be_empty and str(x) == "") for x in texts)
    if missing or (values.dtype.kind == "f" and np.isnan(values).any()):
        raise ConfigError(
            f"HuggingFaceDataModule: the column {column!r} has rows without a value; it must have "
            "one in each row"
        )
    if values.dtype == object and isinstance(values[0], str):
        return values.astype(str)
    return values


def _numbers(argument: str, split: Any, column: str) -> np.ndarray:
    """Returns a column of numbers, float32 or int64 [N, ...]; inputs have a feature axis."""
    values = np.asarray(_values(split, column))
    if values.dtype.kind not in "biuf":
        feature = " ".join(str(split.features[column]).split())
        raise ConfigError(
            f"HuggingFaceDataModule.{argument}: the column {column!r} holds {feature}; it must "
            "hold numbers, text, images, or lists of numbers of one shape"
        )
    if argument == "input_column" and values.ndim == 1:
        values = values[:, None]
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.dtype == np.uint8 and values.ndim > 1:
        return values
    return values.astype(np.int64)


def _cell(cell: str) -> str | None:
    """Returns a cell of a CSV file as it is written, or None for a missing value."""
    if cell in _MISSING_IN_CSV:
        return None
    return cell


def _client_ids(splits: Sequence[Any], column: str) -> np.ndarray:
    """Returns the client of each training sample, and of each test sample if they have one."""
    with_ids = splits
    if not all(column in split.column_names for split in splits):
        with_ids = splits[:1]
    return np.concatenate([_values(split, column, may_be_empty=False) for split in with_ids])
