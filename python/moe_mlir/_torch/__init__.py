"""Every name of torch that begins with an underscore, under a name of our own.

Such names may go with any version of torch. Here they are found when a module is imported, and
tests/python/packaging/test_torch_names.py says which one a new torch has taken away.
"""
