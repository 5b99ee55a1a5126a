"""llmc: a compiler for language models. Importing this package loads nothing heavy."""

__version__ = "0.1.0"
