"""How much JSON one body may hold: what parsing it costs goes with its values, not with its bytes.

The JSON parser holds Python's interpreter lock, so that no other thread answers while it runs. Bodies within these
limits take it some 10 ms at most.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmc.runtime.request import RequestError

# Token ids, for the most part: two prompts of 128k tokens, 32 of 8k.
MAX_VALUES = 2**18
# Messages and their parts, prompts, tool calls; and the fields of all those.
MAX_CONTAINERS = 2**13
MAX_FIELDS = 2**14
# A body of fewer bytes cannot exceed any of them.
ALWAYS_FITS = 2 * MAX_CONTAINERS

_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def check_size(data: bytes) -> None:
    """Raises RequestError when the JSON text `data` holds more than a body may. Does not parse it: what is no JSON may
    pass. Other threads run meanwhile."""
    if len(data) <= ALWAYS_FITS:
        return
    text = np.frombuffer(data, np.uint8)
    if not _excess(text):  # the usual case: few enough, even if those within strings are counted
        return
    excess = _excess(_outside_strings(text))
    if excess:
        raise RequestError(f"the body holds more than {excess}; send fewer prompts or messages in one request")


def _excess(text: npt.NDArray[np.uint8]) -> str | None:
    """What there is too much of in JSON text without strings."""
    if _count(text, ",") > MAX_VALUES:
        return f"{MAX_VALUES} values"
    if _count(text, "[") + _count(text, "{") > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} lists and objects"
    if _count(text, ":") > MAX_FIELDS:
        return f"{MAX_FIELDS} fields"
    return None


def _count(text: npt.NDArray[np.uint8], character: str) -> int:
    return int(np.count_nonzero(text == ord(character)))


def _outside_strings(text: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The bytes that are in no string of JSON text."""
    quotes = np.flatnonzero(text == _QUOTE)
    # A quote is escaped when the run of backslashes before it is odd.
    is_plain = text != _BACKSLASH
    last_plain = np.maximum.accumulate(np.where(is_plain, np.arange(text.size, dtype=np.int32), np.int32(-1)))
    before = np.where(quotes > 0, last_plain[quotes - 1], -1)
    real = quotes[(quotes - 1 - before) % 2 == 0]
    toggles = np.zeros(text.size, np.bool_)
    toggles[real] = True
    outside: npt.NDArray[np.uint8] = text[~np.logical_xor.accumulate(toggles)]
    return outside
