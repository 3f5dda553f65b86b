"""Adapters to other libraries; each imports the library that it is named after, and `import rnnt` imports none."""
