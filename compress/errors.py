"""The two ways a run ends badly, and the exit code each one has.

`ValueError` and `OSError` are bad usage or bad input (exit code 2); `CheckFailed` is work that was
done and found wrong (exit code 1). Anything else is a bug and shows its traceback.
"""


class CheckFailed(Exception):
    """A check of finished work failed: do not trust the result. The message says what differs."""


_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")  # torch, on CPUs and on GPUs


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for a Python object or a tensor."""
    if isinstance(error, RuntimeError):
        return any(text in str(error) for text in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def one_line(error: BaseException, message: str = "") -> str:
    """What went wrong, where, and what to do: the message and the notes of `error` in one line."""
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename}" if error.filename else ""
        message = f"{error.strerror}{place}"
    parts = [message or str(error), *getattr(error, "__notes__", [])]
    return "; ".join(" ".join(part.split()) for part in parts)
