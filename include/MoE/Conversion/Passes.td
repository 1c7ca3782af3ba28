//===- Passes.td - Passes that leave the moe dialect -------*- tablegen -*-===//
//
// Keep alphabetical.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_CONVERSION_PASSES_TD
#define MOE_CONVERSION_PASSES_TD

include "mlir/Pass/PassBase.td"

def ConvertMoEAssertToCFPass : Pass<"convert-moe-assert-to-cf"> {
  let summary = "Turn moe.assert into cf.assert, without its values";
  let description = [{
    For kernels of a GPU, where `convert-gpu-to-nvvm` lowers `cf.assert` to
    CUDA's `__assertfail`. Its message is a constant.
  }];
  let dependentDialects = ["::mlir::cf::ControlFlowDialect"];
}

def ConvertMoEToCPUPass
    : Pass<"convert-moe-to-cpu", "mlir::func::FuncOp"> {
  let summary = "Turn moe ops and contractions on buffers into vector code";
  let description = [{
    Turns `moe.topk_renorm`, `moe.softmax_mix` and their gradients,
    `moe.mad_dispersion`, `moe.co_selections`, `moe.dispatch` and
    `moe.combine`, and of `linalg` contractions, sums and maxima along rows and
    reads of the rows of a table, all on buffers with contiguous rows, into
    `scf` loops over 1-D vectors of `vector-width` lanes.
    Other moe ops must have been decomposed; one that is left is an error.

    The order of every float reduction is fixed and does not depend on the
    position of a row in the buffer or on the number of rows, so that results
    do not change with tiling, threads or batch. Nor do they with the numbers
    that say how products, experts, mixing and selection are cut: where one is
    0, it follows from the vectors and the second cache
    (`MoE/Conversion/CPUTarget.h`).
  }];
  let dependentDialects = [
    "::mlir::LLVM::LLVMDialect",
    "::mlir::amx::AMXDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::memref::MemRefDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::vector::VectorDialect",
  ];
  let options = [
    Option<"vectorWidth", "vector-width", "int64_t", /*default=*/"16",
           "lanes of a vector, a power of two; 16 is one AVX-512 register">,
    Option<"vectorRegisters", "vector-registers", "int64_t", /*default=*/"32",
           "vector registers that tiles may fill: 32 of AVX-512, 16 of AVX2">,
    Option<"bf16Dot", "bf16-dot", "bool", /*default=*/"false",
           "multiply bf16 tokens in pairs by vdpbf16ps of AVX512_BF16">,
    Option<"bf16Tiles", "bf16-tiles", "bool", /*default=*/"false",
           "multiply pairs of bf16 by tdpbf16ps of AMX">,
    Option<"int8Dot", "int8-dot", "bool", /*default=*/"false",
           "multiply bytes by vpdpbusd of AVX512_VNNI or AVX_VNNI">,
    Option<"bytePairs", "byte-pairs", "bool", /*default=*/"false",
           "multiply bytes by vpmaddubsw of AVX2 or AVX512BW">,
    Option<"byteTable", "byte-table", "bool", /*default=*/"false",
           "look up codes of 8 bits by vpermi2b of AVX512_VBMI">,
    Option<"streamPrefetcher", "stream-prefetcher", "bool", /*default=*/"false",
           "ask for no codes that are read in order: the CPU does by itself">,
    Option<"l2Bytes", "l2-bytes", "int64_t", /*default=*/"1048576",
           "bytes of the second cache of a core">,
    // Of the numbers that follow from these, those that were measured.
    Option<"productVectors", "product-vectors", "int64_t", /*default=*/"0",
           "vectors of columns of a product's register tile">,
    Option<"productRows", "product-rows", "int64_t", /*default=*/"0",
           "rows of a product's register tile">,
    Option<"productPanels", "product-panels", "int64_t", /*default=*/"0",
           "panels of columns that a product packs at a time">,
    Option<"expertRows", "expert-rows", "int64_t", /*default=*/"0",
           "rows of a layer of experts whose sums lie in cache together">,
    Option<"mixQueries", "mix-queries", "int64_t", /*default=*/"0",
           "queries that share one packing of keys, a multiple of 6">,
    Option<"fetchBytes", "fetch-bytes", "int64_t", /*default=*/"0",
           "how far ahead the scores of a selection are fetched">,
  ];
}

def ConvertMoEToGPUPass : Pass<"convert-moe-to-gpu", "::mlir::ModuleOp"> {
  let summary = "Convert block-level moe ops on buffers to GPU kernels";
  let description = [{
    Outlines each `scf.forall` that is mapped to `#gpu.block` into a kernel and
    lowers the ops in it to the code of one thread. The ops of a loop share one
    kernel and meet in workgroup memory. `MoE/Conversion/MoEToGPU.h` documents
    the kernels' parameters and the attribute `moe.kernels`, which says how to
    launch them.

    Lowered are `moe.router_logits`, `moe.softmax_mix` with up to 256 columns of
    values, `moe.topk_renorm` without `num_valid` and with up to 2048 experts,
    ops of `linalg`, and `memref.copy`; any other op on buffers is an error that
    names it. Work outside of the loops must have been given to one by
    `moe-distribute-to-grid`. Where the `#moe.kernel_config`s of its ops agree, a
    kernel has blocks of as many threads as they say, else of `block-size`.
    Sums of `moe.router_logits` are taken in a fixed order
    that differs from the CPU's, and exponentials by `ex2.approx.ftz`.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::gpu::GPUDialect",
    "::mlir::memref::MemRefDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::vector::VectorDialect",
  ];
  let options = [
    Option<"blockSize", "block-size", "int64_t", /*default=*/"128",
           "threads of a block, a multiple of 32">,
  ];
  let statistics = [
    Statistic<"numKernels", "num-kernels", "Number of kernels made">,
  ];
}

def MoEAttachNVVMTargetPass
    : Pass<"moe-attach-nvvm-target", "::mlir::ModuleOp"> {
  let summary = "Say for which NVIDIA chip the kernels are compiled";
  let description = [{
    Attaches an `#nvvm.target` to the module, as `moe.target`, with the lowest
    PTX version that knows the chip. Passes that need facts of the chip look
    them up by its name, and `convert-moe-to-gpu` hands the target on to its
    kernels. Differs from `nvvm-attach-target` in that an unknown chip is an
    error, reported before any pass has run.
  }];
  let dependentDialects = ["::mlir::NVVM::NVVMDialect"];
  let options = [
    Option<"chip", "chip", "std::string", /*default=*/"\"sm_90\"",
           "chip to compile for, such as sm_90">,
  ];
}

def MoEDecomposeForCPUPass : Pass<"moe-decompose-for-cpu"> {
  let summary = "Decompose the moe ops that have no CPU kernel";
  let description = [{
    Runs `moe-decompose` on every op that `convert-moe-to-cpu` has no pattern
    for. An op that is added to the dialect with its meaning only runs on the
    CPU through this pass.
  }];
  let options = [
    Option<"vectorWidth", "vector-width", "int64_t", /*default=*/"16",
           "lanes of the vectors that `convert-moe-to-cpu` is told">,
  ];
  // Also those of the pass that it runs.
  let dependentDialects = [
    "::mlir::moe::MoEDialect",
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoEDecomposeForGPUPass : Pass<"moe-decompose-for-gpu"> {
  let summary = "Decompose the moe ops that have no GPU kernel";
  let description = [{
    Runs `moe-decompose` on every op that `convert-moe-to-gpu` and
    `moe-distribute-to-grid` have no pattern for, and fuses the elementwise
    parts. An op that is added to the dialect with its meaning only runs on the
    GPU through this pass.
  }];
  // Also those of the pass that it runs.
  let dependentDialects = [
    "::mlir::moe::MoEDialect",
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoEDecomposeExpertsForGPUPass
    : Pass<"moe-decompose-experts-for-gpu", "::mlir::func::FuncOp"> {
  let summary = "Cut the layers of experts by the number of their rows";
  let description = [{
    Where an expert has few rows, reading its weights is what takes the time, and
    where it has many, multiplying them does. `moe.grouped_linear` has a kernel
    for each, the second one on chips with wgmma. An op of a form that the kernel
    for few rows knows, and of a number of rows that is not known, is cut in two:
    one op has the rows where they are at most 16 an expert, and none otherwise;
    the other one has them where they are more. Each asks for its kernel by
    `moe.kernel_config`. A configuration that the user asks for is for all rows.

    Loops of no iteration are no launches, so that the host sees from the sizes
    which of the two runs. What has no kernel is decomposed: the part of many
    rows on chips without wgmma, and `moe.grouped_outer`. The experts' products
    become loops over them, whose blocks multiply tiles of rows.
  }];
  let dependentDialects = [
    "::mlir::moe::MoEDialect",
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoELinearToGroupedLinearPass
    : Pass<"moe-linear-to-grouped-linear", "::mlir::func::FuncOp"> {
  let summary = "Turn dense layers into layers of one expert";
  let description = [{
    A product of rows with a weight `[f, d]` or `[d, f]` of bf16 or f16, with sums
    in f32, becomes `moe.grouped_linear` of one expert that has all rows, with
    the bias that its sums start from and the conversion of its result to 16
    bits. On chips with wgmma that op has kernels for few and for many rows. As
    a linalg op the product would be computed in the kernel of the ops around
    it, each block of which would read the whole weight for its few rows.

    Weights of less than 2^16 elements stay what they are, and so do products in
    loops, and forms that the kernels do not know.
  }];
  let statistics = [
    Statistic<"numReplaced", "num-replaced", "Number of products replaced">
  ];
  let dependentDialects = [
    "::mlir::moe::MoEDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoEScansToReductionsPass
    : Pass<"moe-scans-to-reductions", "::mlir::func::FuncOp"> {
  let summary = "Turn running sums into reductions";
  let description = [{
    Matches a loop over the places of a dim that carries what its body has made of
    the elements so far and keeps it at each place, such as `torch.cumsum`. It
    becomes a `linalg.generic` that reduces, for each place, the elements up to
    it. For n places that is n^2 steps in place of n, which run in parallel; as a
    loop, each iteration would be launched on its own. The lanes of a warp reduce
    parts, so that floats are rounded in another order.
  }];
  let statistics = [
    Statistic<"numReplaced", "num-replaced", "Number of loops replaced">
  ];
  let dependentDialects = [
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoEConcatenationsToSelectionsPass
    : Pass<"moe-concatenations-to-selections", "::mlir::func::FuncOp"> {
  let summary = "Turn concatenations into elementwise ops that choose a part";
  let description = [{
    Matches `tensor.insert_slice` ops that put parts of known sizes next to each
    other along a dim, and that elementwise ops read, as the halves of a rotary
    embedding:

    ```
    %0 = tensor.insert_slice %minus_y into %empty[0, 0] [%n, 32] [1, 1]
    %1 = tensor.insert_slice %x into %0[0, 32] [%n, 32] [1, 1]
    ```

    They become a `linalg.generic` that chooses, for each element, the part that
    has it. What computes and cuts the parts, if it is short, is computed there,
    too. As copies each part would be a launch.
  }];
  let statistics = [
    Statistic<"numReplaced", "num-replaced", "Number of concatenations replaced">
  ];
  let dependentDialects = [
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoEDecomposeForGridsPass : Pass<"moe-decompose-for-grids"> {
  let summary = "Decompose ops into parts of which each gets a grid";
  let description = [{
    Decomposes the ops of the moe dialect without a GPU kernel whose tiles of
    rows span a dim of unknown size: what their meaning consists of would not
    fit into a block, so each part of it gets a grid. And what linalg composes
    of its own ops, such as `linalg.softmax`: as one op it is not fused into its
    consumers.
  }];
  let dependentDialects = [
    "::mlir::moe::MoEDialect",
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoEDistributeToGridPass
    : Pass<"moe-distribute-to-grid", "::mlir::func::FuncOp"> {
  let summary = "Give work outside of loops over blocks to a grid";
  let description = [{
    Every op on buffers that no loop over blocks contains becomes one or more
    loops over blocks, whose bodies are the code of one thread of
    `block-size`. Ops with a pattern of their own (`moe.adjacency_update`,
    `moe.combine`, `moe.dispatch`, `moe.mad_dispersion`, `moe.token_rows`)
    become what that says; ops of `linalg` and copies are
    shared by the threads of all blocks; what remains of the dialect is the work
    of a single block.

    Long reductions into few results are cut into a fixed number of parts, one a
    block, which are combined in order: no float atomics, and the order of a sum
    does not depend on the grid.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::gpu::GPUDialect",
    "::mlir::memref::MemRefDialect",
    "::mlir::scf::SCFDialect",
  ];
  let options = [
    Option<"blockSize", "block-size", "int64_t", /*default=*/"128",
           "threads of a block, a multiple of 32">,
  ];
}

def MoEEraseHostAssertsPass
    : Pass<"moe-erase-host-asserts", "::mlir::func::FuncOp"> {
  let summary = "Erase the assertions of a program that a GPU does not check";
  let description = [{
    The condition of a `moe.assert` at the top of a function lies on the device,
    between two kernels: a host would have to wait for it. Assertions in the
    bodies of `linalg` ops are run by kernels, and stay. A remark names each one
    that goes.
  }];
  let dependentDialects = ["::mlir::moe::MoEDialect"];
}

def MoEMapLoopsToBlocksPass
    : Pass<"moe-map-loops-to-blocks", "::mlir::func::FuncOp"> {
  let summary = "Map the parallel loops of a program to the blocks of grids";
  let description = [{
    The iterations of loops that a program brings, such as one over the experts
    of a layer, become blocks. Each iteration that writes a run of rows, of a
    length that only it knows, is cut into chunks, each a block.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::gpu::GPUDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoESelectKernelConfigPass : Pass<"moe-select-kernel-config"> {
  let summary = "Choose how the kernels of the target run each op";
  let description = [{
    Attaches a `#moe.kernel_config` to every op whose kernels on the target, the
    GPU that `moe-attach-nvvm-target` names or else the CPU, can run it in more
    than one way: rows of a tile, threads of a block, schedule. Each family of
    kernels lists the configurations of its op, best first, beside its patterns;
    tiling, grids and conversions read what was chosen.

    A configuration that an op has already is a wish: the first one that has all
    that it says is taken, and where there is none the error lists those that
    the kernels have. Bits may depend on `schedule`. The attribute
    `moe.kernel_configs` of a module wishes for all ops of a name:

    ```mlir
    module attributes {moe.kernel_configs =
        {softmax_mix = #moe.kernel_config<schedule = mma>}} {
    }
    ```
  }];
  let dependentDialects = ["::mlir::moe::MoEDialect"];
  let options = [
    Option<"tileRows", "tile-rows", "int64_t", /*default=*/"96",
           "rows of a tile of a CPU; kernels may ask for a multiple">,
  ];
}

#endif // MOE_CONVERSION_PASSES_TD
