"""Images in folders, whose classes and clients are names of folders or columns of a table."""

import csv
import io
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..base import FederatedDataModule
from ..errors import ConfigError, require_value
from ..files import files_below
from ..ranges import Count, as_int
from ..rules.sample_values import add_rule
from ..samples.images import Colour, changes_of, decode
from ..samples.loaded import Loaded, NewSamples
from ..samples.memory_map import train_and_test

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

Levels = Literal[
    "class",
    "client/class",
    "class/client",
    "split/class",
    "split/client/class",
    "split/class/client",
    "client/split/class",
]


class ImageFolderDataModule(FederatedDataModule):
    """Images in folders: inputs [N, C, H, W], stored as uint8 and scaled to [0, 1] in each batch.

    Class, client and split of an image are either the names of the folders that it lies in or the
    columns of a table. The client may be a person, a hospital, a camera or a domain: if neither
    `partition` nor `num_clients` is given, each of them is a client, as with `Natural()`. Classes
    are numbered in the ascending order of their names. Images whose name, or a folder's, begins
    with a point are left out: programs write such copies. Links to folders and images are followed.
    Gray images of 16 bits a pixel become float32 in [0, 1] instead, and then all images must have
    16 bits. `levels="client/class"` reads domains such as PACS's:

        pacs/photo/dog/056_0001.jpg
        pacs/sketch/horse/9001.png

    Args:
        folder: The folder of the images.
        levels: What the folder names between `folder` and an image mean, from the outermost:
            "class", "client" and "split", joined by "/". A split is a folder "train" or "test".
            None is "class" where there is no table.
        table: A CSV file, a path relative to `folder`, instead of `levels`: a row for each image
            with the columns `file` (relative to `folder`), `class` and, if wanted, `client` and
            `split` ("train" or "test").
        image_size: Height and width to which all images are resized; None keeps their size, which
            must be the same for all of them.
        cache: A folder for the decoded images, which are then mapped from a file into memory: for
            data sets that do not fit there, or take long to decode. A changed data set is decoded
            anew, into another file. None decodes the images into memory at each start.
        colour: The channels C. "rgb": three, which are equal where an image is gray. "gray": one.
            "stored": those of the files, which must be alike: also transparency, the pages of a
            TIFF file as channels, and numbers of 32 bits as they are.

    Example:
        >>> data = ImageFolderDataModule("pacs", "client/class")
        >>> data.partitioner, data.protocol  # the images are read when they are needed
        (Natural(), SplitOwn(test=0.2, validation=0.1))
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        levels: Levels | None = None,
        table: str | None = None,
        image_size: Count | None = None,
        cache: str | os.PathLike | None = None,
        colour: Colour = "rgb",
        **kwargs: Any,
    ) -> None:
        add_rule(has_clients(Path(folder).expanduser(), levels, table), kwargs)
        super().__init__(**kwargs)
        self.folder = Path(folder).expanduser()
        both = table is not None and levels is not None
        require_value("ImageFolderDataModule.levels", levels, not both, "None, as there is a table")
        self.levels = levels or "class"
        self.table = table
        self.colour = colour
        self.cache = None
        if cache is not None:
            self.cache = Path(cache).expanduser()
        self.image_size = as_int(image_size)
        self._others: list[Path] = []  # files that are no images
        self._hidden: list[Path] = []  # images that a system has written beside those of the user

    def prepare_data(self) -> None:
        if self.cache is not None:
            self._decode(self._find()[0])

    def load(self) -> Loaded:
        found, num_train = self._find()
        classes, labels = np.unique([image.label for image in found], return_inverse=True)
        train, test = train_and_test(self._decode(found), labels.astype(np.int64), num_train)
        paths = [image.path for image in found]
        self.conversions = changes_of(paths, self.image_size, self.cache, self.colour)
        if self._others:
            self.conversions.append(
                f"files left out, as their names do not end with {', '.join(SUFFIXES)}: "
                f"{len(self._others)}, first {str(self._others[0])!r}"
            )
        if self._hidden:
            self.conversions.append(
                "images left out, as the name of a folder or file begins with a point: "
                f"{len(self._hidden)}, first {str(self._hidden[0])!r}"
            )
        owners = [image.client for image in found]
        ids = None
        if owners[0] is not None:
            ids = np.array(owners)
        return Loaded(train, test, ids, class_names=classes.tolist())

    def new_samples(self, path: Path) -> NewSamples:
        """Reads all images below a folder; the first folder below it may be the client's name."""
        if not path.is_dir():
            raise ConfigError("it must be a folder of images")
        places, _, _ = _files_in(path)
        if not places:
            raise ConfigError(f"it holds no images, whose names end with {', '.join(SUFFIXES)}")
        clients = None
        if all(len(place.parts) > 1 for place in places):
            clients = [place.parts[0] for place in places]
        ids = {"file": np.array([place.as_posix() for place in places], object)}
        files = [path / place for place in places]
        inputs = decode(files, self.image_size, None, self.colour)
        return NewSamples(inputs, ids, clients, "images in folders with the clients' names")

    def _decode(self, found: list["_Image"]) -> np.ndarray:
        paths = [image.path for image in found]
        return decode(paths, self.image_size, self.cache, self.colour)

    def _find(self) -> tuple[list["_Image"], int]:
        """Returns all images, the training images first, and the number of training images."""
        key = f"ImageFolderDataModule.folder: {str(self.folder)!r}"
        folder = self.folder
        if not folder.is_dir():
            raise ConfigError(f"{key} is not a folder; it must hold images at {self._place()}")
        found = self._walk() if self.table is None else self._rows(self.table)
        if not found:
            raise ConfigError(f"{key} holds no images; it must hold images at {self._place()}")
        train = [image for image in found if image.split == "train"]
        if not train:
            raise ConfigError(f"{key} holds test images only; it must hold training images, too")
        return [*train, *(image for image in found if image.split == "test")], len(train)

    def _place(self) -> str:
        """Describes where an image lies, for the message of an error."""
        if self.table is not None:
            return f"the paths that {self.table} names"
        return "/".join(f"<{level}>" for level in (*self.levels.split("/"), "image"))

    def _walk(self) -> list["_Image"]:
        images = []
        levels = self.levels.split("/")
        places, self._others, self._hidden = _files_in(self.folder)
        for place in places:
            path = self.folder / place
            if not path.is_file():
                raise ConfigError(
                    f"ImageFolderDataModule.folder: {str(path)!r} is a link to a file that does "
                    "not exist; each image must be there"
                )
            *names, _ = place.parts
            if len(names) != len(levels):
                raise ConfigError(
                    f"ImageFolderDataModule.levels: {self.levels!r}, but there is {str(path)!r}; "
                    f"all images must lie at {self._place()}"
                )
            images.append(_image(path, dict(zip(levels, names, strict=True)), str(path)))
        return images

    def _rows(self, name: str) -> list["_Image"]:
        path = self.folder / name
        key = f"ImageFolderDataModule.table: {str(path)!r}"
        if not path.is_file():
            raise ConfigError(f"{key}; it must be an existing CSV file")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{key}; it must be saved as UTF-8 ({error.reason})") from error
        reader = csv.DictReader(io.StringIO(text, newline=""))
        columns = reader.fieldnames or ()
        if not {"file", "class"} <= set(columns) or len(set(columns)) < len(columns):
            raise ConfigError(
                f"{key} has the columns {', '.join(columns)}; it must have the columns "
                "file and class, and may have client and split, each once"
            )
        images: dict[Path, _Image] = {}
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row:
                raise ConfigError(
                    f"{key}: {place} has {len(columns) + len(row[None])} cells instead of "
                    f"{len(columns)}; a comma in a name needs quotes around the name"
                )
            for column in ("file", "class", "client"):
                if column in columns and not row[column]:
                    raise ConfigError(f"{key}: {place} has no {column}; every row must have one")
            image = _image(self.folder / row["file"], row, place)
            if not image.path.is_file():
                raise ConfigError(f"{key} names {str(image.path)!r}, which does not exist")
            if image.path in images:
                raise ConfigError(
                    f"{key} names {str(image.path)!r} twice; each image must be in it once"
                )
            images[image.path] = image
        return list(images.values())


def _files_in(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Returns the images below a folder, other files, and images that are hidden; paths from there.

    Images are hidden where their name, or a folder's, begins with a point.
    """
    images: list[Path] = []
    others: list[Path] = []
    hidden: list[Path] = []
    for path in sorted(files_below(folder)):
        place = path.relative_to(folder)
        is_image = path.suffix.lower() in SUFFIXES
        if any(part.startswith(".") for part in place.parts):
            if is_image:
                hidden.append(place)
        elif is_image:
            images.append(place)
        else:
            others.append(place)
    return images, others, hidden


def has_clients(folder: Path, levels: str | None, table: str | None) -> bool:
    """Returns whether folders, or the columns of a table, are clients."""
    if table is None:
        return "client" in (levels or "").split("/")
    path = folder / table
    if not path.is_file():
        return True  # `load` says that it is missing
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return "client" in (csv.DictReader(file).fieldnames or ())


class _Image(NamedTuple):
    """A file, with its class, client and split."""

    path: Path
    label: str
    client: str | None
    split: str


def _image(path: Path, values: dict[str, str], place: str) -> _Image:
    """Returns an image, with `values` from its folders or its row, which is at `place`."""
    split = values.get("split", "train")
    key = f"ImageFolderDataModule: the split of {place}"
    known = ("train", "test")
    require_value(key, split, split in known, "train or test")
    return _Image(path, values["class"], values.get("client"), split)
