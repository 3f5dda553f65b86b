"""The full training step of a FastConformer transducer, with each loss: `python -m benchmarks.model`.

    data ─> network, losses ─> training ─> measure ─> model (command), table, picture

The loss by itself is measured by `python -m rnnt bench` and tests/benchmarks.
"""
