// RUN: not %moe-opt %s --moe-decompose=ops=topk_renorm,moe.sort 2>&1 | FileCheck %s

// CHECK: error: expected the names in option 'ops' of moe-decompose to be among {{.*}}router_logits, {{.*}}; found moe.sort
module {}
