//===- MoEAssertOp.td - Errors of a call at run time -------*- tablegen -*-===//
//
// Apart from MoEOps.td: every op there is structured.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOEASSERTOP_TD
#define MOE_DIALECT_MOE_IR_MOEASSERTOP_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"

// It writes, to nothing that other ops know, so that it stays where it is.
def MoE_AssertOp : MoE_Op<"assert", [MemoryEffects<[MemWrite]>]> {
  let summary = "ends the call with an error unless a condition holds";
  let description = [{
    Like `cf.assert`, but what ends is the call and not the process, and the
    message has values of the call: `{0}` in it stands for the first of
    `values`, `{1}` for the second, up to `{7}`.

    ```mlir
    func.func @check(%row: i64, %rows: index, %inside: i1) {
      moe.assert <index> %inside, "row {0} of {1}" (%row, %rows : i64, index)
      return
    }
    ```

    On a CPU the call returns the error to its host: an IndexError, a
    ZeroDivisionError or a RuntimeError in Python, as `error` says, and an
    exception from an artifact. Results then hold anything, and nothing behind
    the op was run in the same thread. On a GPU the kernel fails an assertion
    with the message, without the values, and the context ends as it does
    for eager torch.
  }];
  let arguments = (ins
    MoE_ErrorKindAttr:$error,
    I1:$condition,
    StrAttr:$message,
    Variadic<AnyTypeOf<[Index, AnySignlessInteger]>>:$values
  );
  let assemblyFormat = [{
    $error $condition `,` $message
    ( `(` $values^ `:` type($values) `)` )? attr-dict
  }];
  let hasVerifier = 1;
  let hasCanonicalizeMethod = 1;
  let extraClassDeclaration = [{
    /// Of values, and of the digit in a place of the message.
    static constexpr unsigned kMostValues = 8;
  }];
}

#endif // MOE_DIALECT_MOE_IR_MOEASSERTOP_TD
