"""Programs that use `rnnt` on real input.  Run them as modules from the repository's root."""
