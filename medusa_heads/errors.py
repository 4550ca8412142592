"""Errors whose message is for the user: one line that says what is wrong and, where there are two sides, names both."""


class UserError(Exception):
    """Root of the errors that the command line prints without a traceback."""


class BaseLoadError(UserError):
    """The base model cannot be found, read or trusted."""


class UnsupportedModelError(UserError):
    """The base is a model that cannot be decoded by trees, with the reason."""


class HeadsError(UserError):
    """The heads cannot be read, or belong to another base."""


class BaseNeeded(HeadsError):
    """The heads cannot be read or written without their base at hand."""


class ConfigError(UserError):
    """A configuration is wrong: an unknown key, or values that clash."""
