"""The one prepared command for a few minutes on a GPU: is it right there, and how fast is it?

    python -m benchmarks.gpu                                   # on a GPU
    python -m benchmarks.gpu --device cpu --tiny --out /tmp/x  # a rehearsal of every case
    python -m benchmarks.gpu --only check W1/fp32              # some cases
    python -m benchmarks.gpu --page > benchmarks/results/gpu.md

`driver.py` runs the cases of `cases.py` in order, in worker processes (`worker.py`), and appends a
line of JSON for each to cases.jsonl as it ends; a case with a line there is not run again.
`checks.py` compares the card with the CPU; `ours.py`, `hand.py` and `peers.py` are the sides that
are timed on the `shapes.py`; `page.py` prints the tables.
"""
