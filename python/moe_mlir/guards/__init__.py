"""What a compiled model reads of a model, and whether it is as it was."""
