"""Time and memory of the backends beside the GEMM floor: `python -m pytest tests/benchmarks`."""
