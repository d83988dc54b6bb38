"""The two ways a run ends badly, and the exit code each one has.

`ValueError` and `OSError` are bad usage or bad input (exit code 2); `CheckFailed` is work that was
done and found wrong (exit code 1). Anything else is a bug and shows its traceback.
"""


class CheckFailed(Exception):
    """A check of finished work failed: do not trust the result. The message says what differs."""
