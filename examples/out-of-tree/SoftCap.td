//===- SoftCap.td - The softcap dialect --------------------*- tablegen -*-===//

#ifndef SOFTCAP_TD
#define SOFTCAP_TD

include "mlir/IR/OpBase.td"
include "mlir/Interfaces/InferTypeOpInterface.td"
include "mlir/Interfaces/SideEffectInterfaces.td"

def SoftCap_Dialect : Dialect {
  let name = "softcap";
  let cppNamespace = "::softcap";
  let summary = "soft capping of router logits";
}

def SoftCap_CapOp : Op<SoftCap_Dialect, "cap", [Pure, SameOperandsAndResultType]> {
  let summary = "squash values smoothly into (-cap, cap)";
  let description = [{
    `y = cap * tanh(x / cap)` for each element, computed in f32. Small values
    stay almost as they are; no value exceeds `cap`. NaN stays NaN. Since -inf
    becomes `-cap`, experts that are masked by -inf must be masked after it.

    ```mlir
    %y = softcap.cap %x by 30.0 : tensor<?x64xf32>
    ```
  }];
  let arguments = (ins RankedTensorOf<[F32, BF16, F16]>:$input, F32Attr:$cap);
  let results = (outs RankedTensorOf<[F32, BF16, F16]>:$result);
  let assemblyFormat = "$input `by` $cap attr-dict `:` type($input)";
  let hasVerifier = 1;
}

#endif // SOFTCAP_TD
