"""`python -m moe_mlir._import_program IN.pt2 OUT.mlir`: what moe-compile runs for
torch programs. The weights become arguments of the function."""

import sys


def main(arguments) -> int:
    if len(arguments) != 2:
        print("expected IN.pt2 and OUT.mlir", file=sys.stderr)
        return 2
    source, target = arguments
    import torch

    from . import export

    try:
        program = torch.export.load(source)
    except Exception as error:
        # torch raises whatever the zip and JSON readers below it raise.
        print(f"{source}: error: expected a program of torch.export.save: {error}",
              file=sys.stderr)
        return 1
    try:
        module = export(program, None)
    except ValueError as error:
        print(f"{source}: error: {error}", file=sys.stderr)
        return 1
    with open(target, "w") as file:
        file.write(module.text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
