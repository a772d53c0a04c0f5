"""Runs docs/tutorial.ipynb and stores what it prints and draws: pip install nbclient ipykernel.

Run it in an environment that has this package. What Lightning says about the machine is left out.
"""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FILE = Path(__file__).parents[1] / "tutorial.ipynb"

notebook = nbformat.read(FILE, as_version=4)
with tempfile.TemporaryDirectory() as folder:
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, resources=resources, record_timing=False).execute()
for cell in notebook.cells:
    if cell.cell_type == "code":
        cell.outputs = [part for part in cell.outputs if part.get("name") != "stderr"]
notebook.metadata.language_info = {"name": "python"}
nbformat.write(notebook, FILE)
