//===- MoEKernelConfig.td - How a kernel runs an op --------*- tablegen -*-===//
//
// Apart from the attributes that say what ops mean: only the passes that choose
// or read a configuration include what is generated from this file.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOEKERNELCONFIG_TD
#define MOE_DIALECT_MOE_IR_MOEKERNELCONFIG_TD

include "mlir/IR/AttrTypeBase.td"
include "mlir/IR/EnumAttr.td"
include "MoE/Dialect/MoE/IR/MoEBase.td"

class MoE_KernelEnum<string name, string summary, list<I32EnumAttrCase> cases>
    : I32EnumAttr<name, summary, cases> {
  let cppNamespace = "::mlir::moe";
  let genSpecializedAttr = 0;
}

def MoE_KernelSchedule : MoE_KernelEnum<"KernelSchedule", "how a kernel computes an op", [
  I32EnumAttrCase<"Any", 0, "any">,
  // GPU: multiply-adds in f32; a warp's matrix products; a warpgroup's.
  I32EnumAttrCase<"Float", 1, "float">,
  I32EnumAttrCase<"Mma", 2, "mma">,
  I32EnumAttrCase<"Wgmma", 3, "wgmma">,
  // CPU: each query goes over its keys; or one pass over pairs of tokens, of
  // which each is the query and the key of the other.
  I32EnumAttrCase<"Queries", 4, "queries">,
  I32EnumAttrCase<"PairsOnce", 5, "pairs_once">,
  // GPU, routers: mma, but up to 256 tokens are multiplied by blocks that have a
  // part of the features and experts each; the two steps that make them up.
  I32EnumAttrCase<"MmaSplit", 6, "mma_split">,
  I32EnumAttrCase<"ChunkProducts", 7, "chunk_products">,
  I32EnumAttrCase<"ChunkSums", 8, "chunk_sums">,
]>;

def MoE_KernelLoop : MoE_KernelEnum<"KernelLoop", "which ops run in the loop over an op's tiles", [
  I32EnumAttrCase<"Shared", 0, "shared">,
  I32EnumAttrCase<"Own", 1, "own">,
  I32EnumAttrCase<"Kernel", 2, "kernel">,
]>;

def MoE_KernelConfigAttr : AttrDef<MoE_Dialect, "KernelConfig"> {
  let mnemonic = "kernel_config";
  let summary = "how a kernel runs an op";
  let description = [{
    What `moe-select-kernel-config` chooses for an op, from facts of the op and of
    the chip or CPU, and what tiling, grids and conversions read:

    - `rows`: rows of a tile. Ops that share a loop take the most that one of
      them asks for;
    - `threads`: threads of a block, where the kernel has no other shape;
    - `schedule`: how the kernel computes;
    - `loop`: `own` where no other op's results are computed from its tiles,
      `kernel` where the op stays whole and its kernel makes the loop;
    - `shared_bytes`: workgroup memory that the kernel plans with for `rows`.

    What is left out is 0, `any` or `shared`. One that stands on an op before
    the pass (the attribute `moe.kernel_config`) is kept if a kernel can do it, and
    completed:

    ```
    moe.softmax_mix ins(...) outs(...)
        {moe.kernel_config = #moe.kernel_config<schedule = mma>}
    ```
  }];
  let parameters = (ins
    DefaultValuedParameter<"int64_t", "0">:$rows,
    DefaultValuedParameter<"int64_t", "0">:$threads,
    DefaultValuedParameter<"::mlir::moe::KernelSchedule",
                           "::mlir::moe::KernelSchedule::Any">:$schedule,
    DefaultValuedParameter<"::mlir::moe::KernelLoop",
                           "::mlir::moe::KernelLoop::Shared">:$loop,
    DefaultValuedParameter<"int64_t", "0">:$shared_bytes
  );
  let assemblyFormat = "`<` struct(params) `>`";
  let genVerifyDecl = 1;
}

#endif // MOE_DIALECT_MOE_IR_MOEKERNELCONFIG_TD
