//===- SoftCapPasses.td - Passes on router logits ----------*- tablegen -*-===//

#ifndef SOFTCAP_PASSES_TD
#define SOFTCAP_PASSES_TD

include "mlir/Pass/PassBase.td"

def InsertSoftCapPass : Pass<"softcap-insert"> {
  let summary = "Cap the logits from which routers choose experts";
  let description = [{
    Puts a `softcap.cap` before each `moe.topk_renorm` that reads logits on
    tensors and whose logits are not capped already.
  }];
  let options = [
    Option<"cap", "cap", "double", /*default=*/"30.0", "largest absolute value of a logit">,
  ];
  let dependentDialects = ["::softcap::SoftCapDialect"];
}

def ConvertSoftCapToLinalgPass : Pass<"convert-softcap-to-linalg"> {
  let summary = "Replace softcap.cap by linalg";
  let description = [{
    What it leaves is what the pipelines of moe-mlir take, `moe-to-cpu` for
    example, which fuses it into the loops of the router around it.
  }];
  let dependentDialects = [
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::tensor::TensorDialect",
  ];
}

#endif // SOFTCAP_PASSES_TD
