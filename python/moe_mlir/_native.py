"""The native module, loaded at first use so that `import moe_mlir` stays quick."""

import functools


@functools.cache
def native():
    """The module `moe_mlir._moe`: IR text in, machine code out."""
    try:
        from . import _moe
    except ModuleNotFoundError as error:
        raise ImportError(
            "expected the native module moe_mlir._moe beside the package, found none: build it "
            "with ./setup.sh and use the package in build/python, or install the wheel"
        ) from error
    except ImportError as error:
        raise ImportError(
            f"cannot load the compiler: {error}; `moe doctor` shows what this "
            "environment has"
        ) from error
    return _moe


def __getattr__(name):
    if name == "MoeError":
        return native().MoeError
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
