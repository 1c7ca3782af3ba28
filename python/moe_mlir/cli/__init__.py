"""The commands of `moe` that are written in Python."""
