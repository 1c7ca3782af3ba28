// RUN: not %moe-opt %s --moe-decompose=ops=topk_renorm,moe.sort 2>&1 | FileCheck %s

// CHECK: error: expected the names in option 'ops' of moe-decompose to be among adjacency_gate, adjacency_update, attention_posterior, mad_dispersion, router_logits, similarity_inform, softmax_mix, topk_renorm; found moe.sort
module {}
