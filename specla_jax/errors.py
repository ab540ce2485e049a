"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A wrong argument or file. The message is one line: what is wrong and what would be right.

    The command line prints it as ``error: ...`` and exits with status 2.
    """
