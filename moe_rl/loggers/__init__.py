"""Mirrors of a run's numbers: one tracker per file, `base` has the contract."""
