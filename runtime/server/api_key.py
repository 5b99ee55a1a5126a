"""The key that guards /v1: from a flag or the environment, and in a request's header."""

from __future__ import annotations

import hmac

from llmc.errors import UserError


def usable_key(text: str) -> str:
    """`text` without the white space around it. Raises UserError for what no client could send as a bearer token."""
    key = text.strip()
    if not key:
        raise UserError("the API key is empty; give a --api-key (or $LLMC_API_KEY), or neither")
    # What the environment holds besides UTF-8 reaches Python as lone surrogates.
    if any(ord(c) < 0x20 or ord(c) == 0x7F or 0xD800 <= ord(c) < 0xE000 for c in key):
        raise UserError(
            "the API key holds control characters or is not UTF-8; give another --api-key (or $LLMC_API_KEY)"
        )
    return key


def is_authorized(header: str, key: str) -> bool:
    """Whether an Authorization header, as ASGI gives it (its bytes as Latin-1), holds `key` in UTF-8."""
    scheme, _, token = header.encode("latin-1").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(b" \t"), key.encode())
