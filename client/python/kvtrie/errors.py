"""What goes wrong for a reason that the caller can do something about."""


class KvtrieError(Exception):
    """The message says what is wrong and what to do; programs print it without a traceback."""
