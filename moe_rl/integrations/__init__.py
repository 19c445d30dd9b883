"""The instrument inside other trainers. Each module needs an extra of its own and is imported by nothing else."""
