"""Other forwards for modules of transformers, found by what their code does (moe_mlir.hf)."""
