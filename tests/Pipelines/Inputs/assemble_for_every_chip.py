"""Assembles the kernels of a file for every chip, and has FileCheck read what ptxas says of each.

    assemble_for_every_chip.py FILE PTXAS PREFIX
"""

import subprocess
import sys

from moe_mlir.compiler.chips import target_chips

file, ptxas, prefix = sys.argv[1:]
for chip in target_chips():
    ptx = f"{prefix}.{chip}.ptx"
    subprocess.run(["moe-compile", file, "-o", ptx, f"--target={chip}", "--emit=ptx"], check=True)
    log = subprocess.run(
        [ptxas, f"-arch={chip}", "-v", "-warn-spills", "-warn-lmem-usage", "-Werror", ptx, "-o",
         f"{prefix}.{chip}.cubin"], stderr=subprocess.PIPE, text=True)
    if log.returncode:
        sys.exit(f"{chip}: {log.stderr}")
    subprocess.run(["FileCheck", file], input=log.stderr, text=True, check=True)
