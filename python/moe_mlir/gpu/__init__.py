"""Kernels on a GPU: how to launch them, and the driver that does."""
