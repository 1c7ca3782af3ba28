//===- Passes.td - Passes that stay in the moe dialect -----*- tablegen -*-===//
//
// Keep alphabetical.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TRANSFORMS_PASSES_TD
#define MOE_TRANSFORMS_PASSES_TD

include "mlir/Pass/PassBase.td"

def MoEApproximateMathPass
    : Pass<"moe-approximate-math", "mlir::func::FuncOp"> {
  let summary = "Replace transcendental functions by polynomials";
  let description = [{
    Replaces exp, log, tanh, erf and their relatives by polynomials in `arith`
    that compile to vector code without calls of a mathematical library. In f32
    exp has a relative error of 7.6e-8, exp(0) is 1 and exp(-inf) is 0; where a
    result would be denormal it is 0, or with `scalef` the denormal. 16-bit
    functions are computed in f32.

    NON-NUMERIC-PRESERVING: results differ from a library's in the last bits.
  }];
  let options = [
    Option<"scalef", "scalef", "bool", /*default=*/"false",
           "scale exp of 16 lanes by vscalefps of AVX-512">,
  ];
  let dependentDialects = [
    "::mlir::LLVM::LLVMDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::math::MathDialect",
    "::mlir::vector::VectorDialect",
  ];
}

def MoEConcatenateInPlacePass
    : Pass<"moe-concatenate-in-place", "mlir::func::FuncOp"> {
  let summary = "Leave a part of a concatenation where it is";
  let description = [{
    Matches a `tensor.insert_slice` into an empty tensor of a slice that is put
    where it comes from, in a tensor of the same shape:

    ```
    %a = tensor.extract_slice %x[0, 0] [%n, 448] : tensor<?x512xf32> to tensor<?x448xf32>
    %y = tensor.insert_slice %a into %empty[0, 0] [%n, 448]
    ```

    `%x` takes the place of `%y`. A model that rotates a part of each head and
    puts it behind the rest copies the rest no more. Bits do not change.
  }];
  let dependentDialects = ["::mlir::tensor::TensorDialect"];
}

def MoEConvertToSoftmaxMixPass : Pass<"moe-convert-to-softmax-mix"> {
  let summary = "Write every softmax over tokens with moe.softmax_mix";
  let description = [{
    Replaces each op with `MixingOpInterface` by `moe.softmax_mix`, or by the
    two sweeps of its gradient, which kernels implement without ever holding
    the token-by-token matrix, and by small ops around it. The posterior of
    Mutual-Inform SMoE (21) becomes an attention over concatenated features,
    `[scale q, wo^T u / sigma^2]` against `[k, v]`, with the key bias
    `-|wo v|^2/(2 sigma^2)` from the Gram matrix `wo^T wo`: the means `wo v` are
    never formed.

    A mix without values (the entropies of all heads, from which the posterior
    chooses one) takes the log-sum-exps and entropies of its rows from an earlier
    mix of the same logits with values, if there is one: the attention emits
    them in its own pass over the keys.

    Tokens that mix with themselves meet in one pass over their pairs where
    `moe-select-kernel-config` chose the schedule `pairs_once`:
    `moe.softmax_mix_self`, and `moe.softmax_mix_backward_self` for the gradient.

    Sums are rounded in another order; nothing else changes. An op on buffers
    stays and gets a missed remark.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::tensor::TensorDialect",
  ];
  let statistics = [
    Statistic<"numConverted", "num-converted", "Number of ops converted">,
    Statistic<"numRefused", "num-refused",
              "Number of ops that could not be converted">,
    Statistic<"numShared", "num-shared",
              "Number of mixes whose rows another mix emits">,
  ];
}

def MoEDecomposePass : Pass<"moe-decompose"> {
  let summary = "Replace moe ops by their meaning in linalg";
  let description = [{
    Replaces each op of the dialect that has `AggregatedOpInterface` by the
    smaller ops that define it: `linalg`, `tensor`, `arith` and `math` on
    tensors. This is the executable meaning of the ops, and the way to
    `linalg` for those without a kernel of their own; for the mixing ops it
    holds the whole token-by-token matrix.

    An op that refuses (only some have a meaning on buffers) stays and gets a
    missed remark with the reason (`--remarks-filter-missed='moe-.*'`).
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    // For the names of the ops, which the option `ops` is checked against.
    "::mlir::moe::MoEDialect",
    "::mlir::tensor::TensorDialect",
  ];
  let options = [
    ListOption<"ops", "ops", "std::string",
               "names of the ops to decompose, with or without `moe.`; all if "
               "empty">,
  ];
  let statistics = [
    Statistic<"numDecomposed", "num-decomposed", "Number of ops decomposed">,
    Statistic<"numRefused", "num-refused",
              "Number of ops that refused to decompose">,
  ];
}

def MoEExpandBooleanAccessesPass : Pass<"moe-expand-boolean-accesses"> {
  let summary = "Read and write booleans in memory as vectors of one";
  let description = [{
    Rewrites `memref.load` and `memref.store` of `i1` to `vector.load` and
    `vector.store` of `vector<1xi1>`, which have a lowering to LLVM where the
    former assert. A boolean keeps its byte in memory: 0 or 1. Runs before
    `convert-vector-to-llvm`. Bits do not change.
  }];
  let dependentDialects = ["::mlir::vector::VectorDialect"];
}

def MoECastExpandedShapesPass : Pass<"moe-cast-expanded-shapes"> {
  let summary = "Expand shapes by several unknown sizes as casts";
  let description = [{
    Turns a `memref.expand_shape` of a contiguous buffer with more than one
    dynamic size in a group into a `memref.reinterpret_cast` with the sizes of
    its `output_shape`, and the strides that follow from them.
    `expand-strided-metadata` takes one dynamic size in a group, and fails an
    assertion on more. Bits do not change.
  }];
  let dependentDialects = ["::mlir::affine::AffineDialect"];
}

def MoEExpandCopiesPass : Pass<"moe-expand-copies", "mlir::func::FuncOp"> {
  let summary = "Copy strided buffers by loops";
  let description = [{
    Turns a `memref.copy` whose sides are not both contiguous into
    `linalg.copy`. The lowering of buffers to LLVM would call a function of a
    runtime library that compiled code does not link. Bits do not change.
  }];
  let dependentDialects = ["::mlir::linalg::LinalgDialect"];
}

def MoEFuseElementwisePass
    : Pass<"moe-fuse-elementwise", "mlir::func::FuncOp"> {
  let summary = "Compute elementwise ops where their results are read";
  let description = [{
    Fuses a `linalg.generic` without reductions into the one that reads its
    result, if no other op does, and it reads each element once and in order:

    ```
    %y = linalg.generic ins(%x) outs(%a) { truncf }
    %z = linalg.generic ins(%y, %w) outs(%b) { extf, mulf }
    ```

    becomes one op, `ins(%x, %w) outs(%b) { truncf, extf, mulf }`, and a loop
    that neither writes nor reads `%y`. Inputs whose elements do not lie next to
    each other stay in an op of their own, so that the rest is still computed on
    vectors. A sum takes what is computed of one tensor, such as squares: with
    two it would be a product, whose kernel rounds in another way. Bits do not
    change.

    For a GPU, where a launch lies between two ops, inputs may be read in any
    order, and casts are computed for each of their readers.
  }];
  let options = [
    Option<"maxInputs", "max-inputs", "unsigned", /*default=*/"8",
           "inputs of a fused op: LLVM compares as many pointers with that of "
           "the result before it uses vectors">,
  ];
}

def MoEFuseReductionsPass
    : Pass<"moe-fuse-reductions", "mlir::func::FuncOp"> {
  let summary = "Take reductions over rows in the loop that computes the rows";
  let description = [{
    Matches an op with `SplitReductionOpInterface` that reduces over the rows
    which an `scf.forall` computes tile by tile, such as the co-selections of
    `moe.adjacency_update`. The loop becomes a loop over parts of the rows, each
    of them a loop over its tiles that folds into a table of its own:

    ```
    scf.forall (%part) = (0) to (%n) step (%rows) {
      scf.for %tile = %part to %end step 64 { .. select, count into the table .. }
    }
    ```

    The tables are combined behind it, in order. There are at most `max-parts`
    of them, and all together they take at most `max-bytes`, however many rows
    there are. What nothing but the reduction reads is no longer stored.

    An op whose tables would be too large, or of which a tile needs what is
    computed behind the loop, stays with a missed remark. Bits do not change:
    the interface splits only reductions that may be taken in any order.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::func::FuncDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::tensor::TensorDialect",
  ];
  let options = [
    Option<"maxParts", "max-parts", "int64_t", /*default=*/"64",
           "parts of the rows at most, the threads that can share them">,
    Option<"maxBytes", "max-bytes", "int64_t", /*default=*/"2097152",
           "memory that the tables of a reduction may take">,
  ];
  let statistics = [
    Statistic<"numFused", "num-fused", "Number of reductions fused">,
    Statistic<"numNotFused", "num-not-fused",
              "Number of reductions that could not be fused">,
  ];
}

def MoEDeclareThreadCountPass
    : Pass<"moe-declare-thread-count", "mlir::ModuleOp"> {
  let summary = "Declare the runtime's function that counts threads";
  let description = [{
    Adds `func.func private @moe_get_num_threads() -> i32`, for passes on
    functions, which may add nothing to the module: where it is declared,
    `moe-tile-and-fuse` asks it how large tiles should be. What stays unused is
    erased by `moe-outline-parallel`.
  }];
  let dependentDialects = [
    "::mlir::func::FuncDialect",
  ];
}

def MoEOutlineLoopsPass
    : Pass<"moe-outline-loops", "mlir::ModuleOp"> {
  let summary = "Move the loops of functions that have many into functions";
  let description = [{
    Moves each outermost `scf.for` without results of a function that has at
    least `min-loops` of them into a private function that is not inlined, with
    what it uses in a struct on the stack of its caller. Loops that do the same
    to other values share one function.

    LLVM's passes over loops look at all of a function for each of its loops,
    and a compilation of hundreds of loops takes less than half of the time
    where each has a function. Bits do not change.
  }];
  let dependentDialects = [
    "::mlir::func::FuncDialect",
    "::mlir::LLVM::LLVMDialect",
  ];
  let options = [
    Option<"minLoops", "min-loops", "int64_t", /*default=*/"32",
           "the fewest loops of a function whose loops are moved">,
  ];
  let statistics = [
    Statistic<"numOutlined", "num-outlined", "Number of loops outlined">,
    Statistic<"numShared", "num-shared",
              "Number of loops with the function of an earlier one">,
  ];
}

def MoEOutlineParallelPass
    : Pass<"moe-outline-parallel", "mlir::ModuleOp"> {
  let summary = "Turn parallel loops on buffers into calls of the runtime";
  let description = [{
    Outlines the body of each outermost `scf.forall` into a private function
    over a range of iterations and calls
    `void moe_parallel_for(int64_t count, void (*body)(int64_t begin, int64_t
    end, void *context), void *context)`. Foralls inside become loops; with
    `threads=false` all of them do. Static `memref.alloca` move to the entry of
    their function, so that loops do not grow the stack.

    Iterations write disjoint memory: bits do not depend on the threads.

    Loops that do the same to other values share one function.
  }];
  let dependentDialects = [
    "::mlir::arith::ArithDialect",
    "::mlir::func::FuncDialect",
    "::mlir::LLVM::LLVMDialect",
    "::mlir::scf::SCFDialect",
  ];
  let options = [
    Option<"threads", "threads", "bool", /*default=*/"true",
           "call the runtime; otherwise make loops">,
  ];
  let statistics = [
    Statistic<"numOutlined", "num-outlined", "Number of loops outlined">,
    Statistic<"numShared", "num-shared",
              "Number of loops with the function of an earlier one">,
  ];
}

def MoEPrivatizeDestinationsPass
    : Pass<"moe-privatize-destinations", "mlir::func::FuncOp"> {
  let summary = "Give every computation a destination of its own";
  let description = [{
    Duplicates empty tensors, and ops that only initialise one, so that each
    has one use. Equal initial values are merged by CSE though they stand for
    different memory. A slice of an empty tensor becomes one of its own. A result
    that starts from a value which is read later starts from a copy. Runs between
    the last CSE and empty-tensor elimination. Bits do not change.
  }];
  let dependentDialects = ["::mlir::bufferization::BufferizationDialect",
                           "::mlir::tensor::TensorDialect"];
}

def MoEKeepReducedDimsPass
    : Pass<"moe-keep-reduced-dims", "mlir::func::FuncOp"> {
  let summary = "Let reductions keep a dim of size 1 where it is added behind";
  let description = [{
    Matches a `tensor.expand_shape` that only adds dims of size 1, and is the
    only user of a `linalg.generic`:

    ```
    %s = linalg.generic ins(%x : tensor<?x512xf32>) .. -> tensor<?xf32>
    %k = tensor.expand_shape %s [[0, 1]] : tensor<?xf32> into tensor<?x1xf32>
    ```

    The op gets a loop of one iteration and the result `tensor<?x1xf32>`; the
    reshape goes on to its operands of the same shape. The mean of a norm then
    has the rows of what it sums and of what is divided by it, so that
    `moe-tile-and-fuse` computes them in one loop. Bits do not change.
  }];
  let dependentDialects = [
    "::mlir::linalg::LinalgDialect", "::mlir::tensor::TensorDialect",
  ];
}

def MoELimitStackPass : Pass<"moe-limit-stack", "mlir::func::FuncOp"> {
  let summary = "Move large buffers from the stack to the heap";
  let description = [{
    Replaces `memref.alloca` by `memref.alloc` and a `memref.dealloc` at the end
    of its block where the size is dynamic, and the largest static ones until
    the others of the function take at most `max-bytes`: threads may have small
    stacks, and one that is too small ends the process, where an allocation that
    fails is an error. Bits do not change.
  }];
  let dependentDialects = ["::mlir::memref::MemRefDialect"];
  let options = [
    Option<"maxBytes", "max-bytes", "int64_t", /*default=*/"262144",
           "the most that static buffers of a function may take of the stack">,
  ];
  let statistics = [
    Statistic<"numMoved", "num-moved", "Number of buffers moved">,
  ];
}

def MoEPromoteTileBuffersPass
    : Pass<"moe-promote-tile-buffers", "mlir::func::FuncOp"> {
  let summary = "Move the bounded buffers of parallel loops to the stack";
  let description = [{
    Replaces a `memref.alloc` inside `scf.forall` whose size has a constant
    bound of at most `max-bytes` by a stack buffer of that bound and a view of
    the size in use: the rows of a tile are at most the tile size. Runs before
    deallocations are inserted. Bits do not change.
  }];
  let dependentDialects = ["::mlir::memref::MemRefDialect"];
  let options = [
    Option<"maxBytes", "max-bytes", "int64_t", /*default=*/"262144",
           "largest buffer that moves to the stack">,
  ];
  let statistics = [
    Statistic<"numPromoted", "num-promoted", "Number of buffers promoted">,
  ];
}

def MoEPropagateReshapesPass : Pass<"moe-propagate-reshapes"> {
  let summary = "Let ops on rows work on them before their dims are joined";
  let description = [{
    Moves a `tensor.collapse_shape` of leading dims behind the op of the moe
    dialect that reads it, where the op's leading dims are free:

    ```
    %p = tensor.collapse_shape %mix [[0], [1, 2], [3]]
    %g, %i = moe.topk_renorm ins(%p)
    ```

    becomes a selection from `%mix` whose results are collapsed. Afterwards the
    selection and the mix have the same rows, and `moe-tile-and-fuse` computes
    both in one loop: the probabilities between them are never stored. Bits do
    not change.
  }];
  let dependentDialects = ["::mlir::tensor::TensorDialect"];
}

def MoEJoinRowsPass : Pass<"moe-join-rows"> {
  let summary = "Let products whose kernels take all rows see them as one dim";
  let description = [{
    Joins the rows of a contraction of linalg for which a kernel with a loop of
    its own was chosen (`loop = kernel`), where they lie along several dims of
    its input and its result:

    ```
    y[b, t, n] += x[b, t, k] w[n, k]
    ```

    becomes a product of a matrix of tokens, between reshapes that are views. A
    kernel that met rows of several dims would read the weight anew for each of
    the outer ones. Bits do not change.
  }];
  let dependentDialects = ["::mlir::tensor::TensorDialect"];
}

def MoEResultsToDestinationsPass
    : Pass<"moe-results-to-destinations", "mlir::ModuleOp"> {
  let summary = "Let callers own the results of public functions";
  let description = [{
    Replaces each result of a public function by a trailing buffer argument in
    which it is materialised; a scalar result takes a buffer of rank 0. Inputs
    are marked as not writable, and the function gets `llvm.emit_c_interface`,
    so that callers find it as `_mlir_ciface_<name>` with a pointer to a memref
    descriptor for every tensor. Bufferization then computes in the caller's
    memory: a compiled function allocates nothing for what it returns.

    A result with `moe.updates` is the new content of the argument that the
    attribute names: it gets no buffer, and the argument is writable. Behind
    bufferization `moe-store-updates` does the rest.
  }];
  let dependentDialects = [
    "::mlir::arith::ArithDialect",
    "::mlir::bufferization::BufferizationDialect",
    "::mlir::LLVM::LLVMDialect",
    "::mlir::memref::MemRefDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

def MoEStoreUpdatesPass : Pass<"moe-store-updates", "mlir::func::FuncOp"> {
  let summary = "Store results that update arguments in these arguments";
  let description = [{
    Runs behind bufferization. Erases each result with `moe.updates`: where
    bufferization computed it in the argument that it updates, nothing is left
    to do; otherwise it is copied there before the function returns.
  }];
  let dependentDialects = ["::mlir::memref::MemRefDialect"];
}

def MoETileAndFusePass
    : Pass<"moe-tile-and-fuse", "mlir::func::FuncOp"> {
  let summary = "Tile ops over their rows and fuse producers into the tiles";
  let description = [{
    Turns every op with `TilingInterface` that nothing consumes tile by tile
    into one `scf.forall` over tiles of its rows, and computes its producers
    inside the tile where each of their rows is needed exactly once. What is
    tiled follows from the op's maps: the parallel dims that all its results
    span, except the innermost dim of the results, which stays contiguous.

    Ops of the moe dialect that read the same rows share the loop: a selection,
    its base selection, and the logits of both that are returned as well are
    one `scf.forall` (SymphonySMoE's softmax, mix and selections, for one). An
    op of the dialect that needs all rows at once, such as a loss, stays behind
    the loop with a missed remark; `moe-fuse-reductions` has the word about one
    that can be taken in parts.

    A producer that is not fused gets a missed remark with the reason
    (`--remarks-filter-missed='moe-.*'`). Bits do not change: each result
    element is computed by the same op from the same operands.

    A tile has as many rows as the `#moe.kernel_config` of one of its ops asks
    for, and `tile-size` rows if none asks. It takes them along the last loop;
    on a CPU, where the group has a product, along the last loop whose rows
    share an operand of it: all rows of one batch read the same matrix. On a CPU
    larger tiles are taken as long as every thread has several of them, which is
    asked at run time (`moe-declare-thread-count`). In a module for a GPU
    (`moe-attach-nvvm-target`) the tiles are mapped to the blocks of a grid, and
    have as many rows as workgroup memory holds of what their ops hand to each
    other.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::arith::ArithDialect",
    "::mlir::func::FuncDialect",
    "::mlir::gpu::GPUDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::tensor::TensorDialect",
  ];
  let options = [
    Option<"tileSize", "tile-size", "int64_t", /*default=*/"64",
           "rows of a tile whose kernels do not ask for a number">,
  ];
  let statistics = [
    Statistic<"numTiled", "num-tiled", "Number of ops tiled">,
    Statistic<"numFused", "num-fused", "Number of producers fused">,
    Statistic<"numNotFused", "num-not-fused",
              "Number of producers that could not be fused">,
  ];
}

#endif // MOE_TRANSFORMS_PASSES_TD
