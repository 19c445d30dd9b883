"""What things cost, as ratios of two that took turns; each command of `experiments/bench.py` is a module here.

A command is a function from its settings, a dataclass, to a table of rows.
"""
