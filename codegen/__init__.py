"""From the lowered graph to machine code and the plan file."""
