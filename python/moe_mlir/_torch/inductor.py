"""Of Inductor, torch.compile's own backend."""

import torch
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.exc import InductorError

aoti_compile_and_package = torch._inductor.aoti_compile_and_package
config = torch._inductor.config

__all__ = ["CustomGraphPass", "InductorError", "aoti_compile_and_package", "compile_fx", "config",
           "get_hash_for_files", "list_mode_options"]
