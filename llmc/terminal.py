"""Standard input and output of `llmc run` and `llmc chat`, whatever they are: a pipe that closes, a full disk, a
terminal that knows ASCII only, bytes that are no text.
"""

from __future__ import annotations

import os
import sys

from llmc.errors import UserError

MOST_INPUT = 64 << 20
"""Bytes of standard input that are read as a prompt: more than any context holds."""


class OutputClosed(Exception):
    """Nobody reads standard output any more."""


def write(text: str) -> None:
    """Writes to standard output and flushes; what its encoding lacks becomes "?".

    Raises OutputClosed when its reader has gone, UserError when it cannot be written.
    """
    stream = sys.stdout
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except BrokenPipeError as error:
        _discard_output()
        raise OutputClosed from error
    except OSError as error:
        _discard_output()
        raise UserError(f"standard output cannot be written: {error.strerror}") from error


def _discard_output() -> None:
    """What is still buffered goes nowhere: the interpreter would complain about it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def read_prompt(argument: str | None) -> str:
    """The prompt that a command was given: its argument, or standard input for "-" and where there is none.

    Raises UserError when there is no prompt, or it is not UTF-8.
    """
    if argument is not None and argument != "-":
        return checked_text(argument, "the prompt")
    if argument is None and sys.stdin.isatty():
        raise UserError("there is no prompt: give one, or - to read it from standard input (llmc chat has a dialogue)")
    data = sys.stdin.buffer.read(MOST_INPUT + 1)
    if len(data) > MOST_INPUT:
        raise UserError(f"standard input has more than {MOST_INPUT >> 20} MiB, which no context holds")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error


def checked_text(text: str, what: str) -> str:
    """The text; a byte of an argument that is not UTF-8 comes as a lone surrogate, which no tokenizer takes.

    Raises UserError for such.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not UTF-8 (character {error.start})") from error
    return text
