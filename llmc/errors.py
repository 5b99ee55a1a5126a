"""The one exception that means "the user can fix this".

Every room raises `UserError` for a bad checkpoint, plan, flag or path. The CLI prints its message as one line
and exits with code 2. Any other exception is our own fault and keeps its traceback.
"""


class UserError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, and what to do, in one line."""


def shortened(value: object) -> str:
    """A user's words for a message of one line: at most 200 characters of them."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
