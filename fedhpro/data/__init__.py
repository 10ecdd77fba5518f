"""Sources (where samples come from), partitions (who gets which), batches (what a step sees)."""

from .sources import SOURCES, Domain, Source, Split, load, with_validation

__all__ = ["SOURCES", "Domain", "Source", "Split", "load", "with_validation"]
