"""The rewrites from the exported graph to the lowered llmc dialect, in one ordered pipeline."""
