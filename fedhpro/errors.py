"""Mistakes that a user can mend: one sentence that says what is wrong, where, and what to do. Never a traceback."""


class UserError(ValueError):
    exit_code = 2


class ConfigError(UserError):
    """A key or value that cannot be used."""


class PartitionError(UserError):
    """A federation that cannot be cut from the samples at hand."""


class DataError(UserError):
    """Data that is missing or cannot be read."""


class RunError(UserError):
    """A run folder, or a file to predict on, that cannot be used."""


class FederationStalled(UserError):
    """Too many rounds in a row without enough valid uploads."""

    exit_code = 1
