"""Prompts and verifiable rewards: one task per file, `base` has the contract."""
