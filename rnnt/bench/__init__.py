"""Time and memory of the loss on the machine at hand: `python -m rnnt bench`.

    shapes ─> steps ─┬─> measure ─> cells ─> command (table, JSON), picture
    floor, peak ─────┘

The benchmarks in tests/benchmarks measure the same steps, each after a comparison with the reference.
"""
