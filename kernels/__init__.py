"""The op dialect (schema and reference of every op) and the kernel sources."""
