"""The layers of a model whose weights may be stored in another way."""
