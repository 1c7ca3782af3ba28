// The kernels that the command line asks for are the module's, in every form.

// RUN: moe-compile %s -o - --emit=mlir --kernel-config="softmax_mix=<rows = 64, schedule = mma>" --kernel-config="router_logits=#moe.kernel_config<rows = 16>" | FileCheck %s --check-prefix=MLIR
// MLIR: module attributes {moe.kernel_configs = {router_logits = #moe.kernel_config<rows = 16>, softmax_mix = #moe.kernel_config<rows = 64, schedule = mma>}}

// RUN: moe-compile %s -o - --target=sm_90a --emit=ptx | FileCheck %s --check-prefix=WGMMA
// RUN: moe-compile %s -o - --target=sm_90a --emit=ptx --kernel-config="softmax_mix=<schedule = mma>" | FileCheck %s --check-prefix=MMA
// WGMMA: wgmma.mma_async
// MMA-NOT: wgmma
// MMA: mma.sync

// RUN: rm -rf %t && mkdir %t
// RUN: not moe-compile %s -o %t/out --kernel-config="softmax_mixed=<rows = 64>" 2>&1 | FileCheck %s --check-prefix=NAME
// NAME: --kernel-config: error: expected kernel configurations for ops of the moe dialect, such as softmax_mix, found one for 'softmax_mixed'

// RUN: not moe-compile %s -o %t/out --kernel-config="softmax_mix=<tile = 64>" 2>&1 | FileCheck %s --check-prefix=PART
// PART: --kernel-config: error: expected the configuration of 'softmax_mix' as it is printed, such as <rows = 64, schedule = mma>, found '<tile = 64>': duplicate or unknown struct parameter name: tile

// RUN: not moe-compile %s -o %t/out --kernel-config=softmax_mix 2>&1 | FileCheck %s --check-prefix=NONE
// NONE: --kernel-config: error: expected the configuration of 'softmax_mix' as it is printed, {{.*}}, found ''

// RUN: not moe-compile %s -o %t/out --kernel-config="softmax_mix=<schedule = mma>" 2>&1 | FileCheck %s --check-prefix=CPU
// CPU: kernel-config.mlir:[[#@LINE+7]]:{{[0-9]+}}: error: 'moe.softmax_mix' op has no such kernel on the CPU: {{.*}}, whose schedule is one of GPUs
// CPU: note: possible: #moe.kernel_config<rows = 192, schedule = queries>
// RUN: ls %t | count 0
func.func @mix(%q: tensor<1x2x?x64xbf16>) -> tensor<1x2x?xf32> {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : tensor<1x2x?x64xbf16>
  %l0 = tensor.empty(%n) : tensor<1x2x?xf32>
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xbf16>, tensor<1x2x?x64xbf16>)
      outs(%l0 : tensor<1x2x?xf32>) -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}
