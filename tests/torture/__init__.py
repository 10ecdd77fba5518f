"""Torture: kills, full disks, hostile replies and load, with figures of what came of it (`make torture`).

    PYTHONPATH=tests python -m torture [crash] [machine] [fuzz] [load] [--short]

Each part ends with an error where a promise is broken: a lost round, other bytes, a crash of the server, a bad upload
that reached the aggregation. docs/reliability.md has the figures of one run, and what they mean.
"""
