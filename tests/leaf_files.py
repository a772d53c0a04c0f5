"""Small files in LEAF's format."""

import json


def write(root, name, folder, users, file="all_data_0.json"):
    """Writes the samples of users, {user: (inputs, targets)}, as LEAF's scripts do."""
    path = root / "data" / name / "data" / folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))
    return path


def images(*values):
    """FEMNIST's form of images with one gray value each: lists of 784 numbers v / 255."""
    return [[value / 255] * 784 for value in values]
