"""The data sets of LEAF, whose samples are owned by writers, celebrities, tweeters and characters.

LEAF's scripts download and convert the data; the data modules here read the JSON files that the
scripts write.
"""

import json
import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..base import FederatedDataModule
from ..errors import ConfigError, error_line, require_value
from ..protocols.protocol import OfficialSplit
from ..ranges import Count, as_int
from ..rules.sample_values import Natural
from ..samples.images import decode
from ..samples.loaded import Loaded
from ..samples.memory_map import train_and_test

# The folders of LEAF's scripts, of which the first one with files holds the latest result.
_UNSPLIT = ("rem_user_data", "sampled_data", "all_data")


class LeafDataModule(FederatedDataModule):
    """The base class of LEAF's data sets, in which each user of the data is a client.

    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018; github.com/TalwalkarLab/leaf.
    The JSON files lie in the folders `train` and `test` that LEAF's `preprocess.sh` writes with
    `-t sample`, which puts a tenth of the samples of each user into the test set. Where these
    folders are missing, the files of `rem_user_data`, `sampled_data` or `all_data` are read, and
    there is no official test set. Users are numbered in the ascending order of their names.

    Args:
        root: The folder of LEAF's repository; the files lie in `root/data/NAME/data`.
        min_samples: Users with fewer samples, training and test samples together, are left out.
        **kwargs: The arguments of `FederatedDataModule`. The default of `partition` is `Natural()`,
            which with `num_clients` keeps the users with the most samples; that of `protocol` is
            `OfficialSplit()`, LEAF's own test samples.

    Example:
        >>> class Synthetic(LeafDataModule):  # LEAF's vectors of 60 numbers
        ...     leaf_name = "synthetic"
        ...     def inputs(self, rows):
        ...         return np.array(rows, np.float32)
        >>> Synthetic(root="leaf", min_samples=10).folder.as_posix()
        'leaf/data/synthetic/data'
    """

    leaf_name: ClassVar[str]  # the data set's folder in LEAF's repository
    # The command that writes the files, in the data set's folder.
    command: ClassVar[str] = "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"
    default_rule = Natural
    default_protocol = OfficialSplit

    def __init__(
        self, root: str | os.PathLike = "data/leaf", min_samples: Count = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.root = Path(root).expanduser()
        self.folder = self.root / "data" / self.leaf_name / "data"
        self.min_samples = int(min_samples)

    @abstractmethod
    def inputs(self, rows: list) -> np.ndarray:
        """Converts the inputs of one user, the list "x" of a file, to an array [n, ...]."""

    def targets(self, values: list) -> np.ndarray:
        """Converts the targets of one user, the list "y" of a file, to classes, int64 [n]."""
        numbers = np.array(values, np.float64)  # CelebA's are floating numbers, 0.0 and 1.0
        classes = np.nan_to_num(numbers, posinf=0, neginf=0).astype(np.int64)
        if (wrong := numbers != classes).any():
            raise ValueError(f"a label is {numbers[wrong][0]}, which is not a whole number")
        return classes

    def encode(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns all inputs as they are stored, from converted training (and test) inputs."""
        return np.concatenate(parts)

    def clients(self, users: np.ndarray) -> np.ndarray:
        """Returns the client id of each user, text [U], by default the user's name.

        `users` are ascending and have enough samples. Users with an empty id are left out.
        """
        return users

    def load(self) -> Loaded:
        parts = [self._read(files) for files in self._files()]
        users, number = np.unique(np.concatenate([p[0] for p in parts]), return_inverse=True)
        enough = np.bincount(number) >= self.min_samples
        key = f"{type(self).__name__}.min_samples"
        most = int(np.bincount(number).max())
        expected = f"at most {most}, the largest number of samples of a user"
        require_value(key, self.min_samples, bool(enough.any()), expected)
        ids = np.full(len(users), "", object)
        ids[enough] = self.clients(users[enough])
        owners = ids[number].astype(str)
        kept = np.split(owners != "", [len(parts[0][0])])
        inputs = self.encode([part[1][k] for part, k in zip(parts, kept, strict=False)])
        targets = np.concatenate([part[2] for part in parts])[owners != ""]
        train, test = train_and_test(inputs, targets, int(kept[0].sum()))
        return Loaded(train, test, owners[owners != ""])

    def _files(self) -> list[list[Path]]:
        """Returns the files of the training set, and of the test set if there is one."""
        names = ("train", "test", *_UNSPLIT)
        found = {name: sorted((self.folder / name).glob("*.json")) for name in names}
        if found["train"] and found["test"]:
            return [found["train"], found["test"]]
        for name in _UNSPLIT:
            if found[name]:
                return [found[name]]
        place = f"data/{self.leaf_name}"
        raise ConfigError(
            f"{type(self).__name__}.root: {str(self.root)!r} has no file "
            f"{place}/data/train/*.json; it must be a clone of "
            f"https://github.com/TalwalkarLab/leaf in whose folder {place} the command "
            f"{self.command} has run"
        )

    def _read(self, files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the user, the converted input and the target of each sample."""
        columns: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for path in files:
            key = f"{type(self).__name__}.root: the file {str(path)!r}"
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                for user in content["users"]:
                    if user in columns:
                        raise ValueError(f"the user {user} is listed twice")
                    data = content["user_data"][user]
                    try:
                        inputs = self.inputs(data["x"])
                        targets = self.targets(data["y"])
                    except (KeyError, TypeError, ValueError) as error:
                        raise ValueError(f"the user {user}: {error_line(error)}") from error
                    if (n := len(inputs)) != len(targets):
                        raise ValueError(f"{user} has {n} inputs and {len(targets)} targets")
                    columns[user] = np.full(len(targets), user), inputs, targets
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{key} cannot be read ({error_line(error)}); it must be a file of LEAF's "
                    f"{self.leaf_name}"
                ) from error
        if not columns:
            raise ConfigError(
                f"{type(self).__name__}.root: the files in {str(files[0].parent)!r} have no users; "
                f"they must hold at least one user of LEAF's {self.leaf_name}"
            )
        owners, inputs, targets = map(np.concatenate, zip(*columns.values(), strict=True))
        return owners, inputs, targets


class FEMNISTDataModule(LeafDataModule):
    """FEMNIST: 805,263 digits and letters [1, 28, 28] of 62 classes, by 3,550 writers.

    Classes 0 to 9 are the digits, 10 to 35 the capital and 36 to 61 the small letters. LEAF's files
    have pixels v / 255; they are stored as the whole number v, uint8.

    FedPD's experiment has 90 agents that own 100 writers: `FEMNISTDataModule(writers=100,
    agents=90)`. As in its code, the writer i (from 0, by name) belongs to the agent i modulo 90, so
    that the first ten agents own two writers each. The paper does not name its writers.

    Args:
        writers: The number of writers, the first ones by name; None takes all.
        agents: The number of clients, to which the writers belong in turn; None makes each writer a
            client.

    Example:
        >>> data = FEMNISTDataModule(root="~/leaf", min_samples=100)
        >>> data.partitioner, data.protocol
        (Natural(), OfficialSplit(validation=0.1))
    """

    leaf_name = "femnist"

    def __init__(
        self, writers: Count | None = None, agents: Count | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.writers = as_int(writers)
        self.agents = as_int(agents)

    def inputs(self, rows: list) -> np.ndarray:
        scaled = 255 * np.array(rows, np.float64).reshape(-1, 1, 28, 28)
        pixels = np.rint(scaled)
        whole = np.abs(scaled - pixels).max(initial=0) < 0.01
        if not (whole and pixels.min(initial=0) >= 0 and pixels.max(initial=0) <= 255):
            raise ValueError("a pixel is none of 0, 1/255, ..., 1")
        return pixels.astype(np.uint8)

    def clients(self, users: np.ndarray) -> np.ndarray:
        count = len(users)
        if self.writers is not None:
            count = self.writers
        expected = f"at most {len(users)}, the number of writers with enough samples"
        require_value("FEMNISTDataModule.writers", self.writers, count <= len(users), expected)
        agents = count
        if self.agents is not None:
            agents = self.agents
        expected = f"at most {count}, the number of writers"
        require_value("FEMNISTDataModule.agents", self.agents, agents <= count, expected)
        names = [users[i % agents] for i in range(count)]  # a client has its first writer's name
        return np.array([*names, *[""] * (len(users) - count)])


class CelebADataModule(LeafDataModule):
    """CelebA: photographs [3, 84, 84] of celebrities who smile (class 1) or do not (class 0).

    Liu, Luo, Wang, Tang, "Deep Learning Face Attributes in the Wild", ICCV 2015. LEAF has 200,288
    images of 9,343 celebrities with five images or more. The files of LEAF name the images, which
    lie in `root/data/celeba/data/raw/img_align_celeba` and are resized to squares.

    Args:
        image_size: Height and width of the images.
        cache: A folder for the decoded images (4 GB), which are then mapped from a file into
            memory. None decodes the images into memory at each start, which takes minutes.

    Example:
        >>> CelebADataModule(root="~/leaf").folder.name
        'data'
    """

    leaf_name = "celeba"
    command = "./preprocess.sh -s niid --sf 1.0 -k 5 -t sample"

    def __init__(
        self, image_size: Count = 84, cache: str | os.PathLike | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.cache = None
        if cache is not None:
            self.cache = Path(cache).expanduser()
        self.image_size = int(image_size)

    def prepare_data(self) -> None:
        if self.cache is not None:
            self.load()

    def inputs(self, rows: list) -> np.ndarray:
        return np.array(rows, str)

    def encode(self, parts: list[np.ndarray]) -> np.ndarray:
        folder = self.folder / "raw" / "img_align_celeba"
        paths = [folder / name for part in parts for name in part]
        for path in paths:
            if not path.is_file():
                raise ConfigError(
                    f"CelebADataModule.root: the image {str(path)!r} is missing; the images are "
                    "img_align_celeba.zip of https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
                )
        size = f"{self.image_size}x{self.image_size}"
        self.conversions = [f"images are resized to {size}, and their 8 bits divided by 255"]
        return decode(paths, self.image_size, self.cache)
