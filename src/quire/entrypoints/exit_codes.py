"""The exit codes of every command."""

OK = 0
FAILED = 1
"""The work failed."""
WRONG_ARGUMENT = 2
"""A setting or an argument is wrong, or the file, folder, server or model that it names cannot be had."""
INTERRUPTED = 130


def of_error(error: BaseException) -> int:
    """The code of a command that an error ended."""
    from quire.errors import ConfigError, RequestError

    return WRONG_ARGUMENT if isinstance(error, ConfigError | RequestError) else FAILED
