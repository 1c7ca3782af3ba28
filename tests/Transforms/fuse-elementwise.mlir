// RUN: %moe-opt %s --moe-fuse-elementwise --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-fuse-elementwise --moe-fuse-elementwise --split-input-file | FileCheck %s

// A chain of casts and a product is one op, which reads its inputs and writes
// its result only.

// CHECK-LABEL: func @fuses_a_chain
// CHECK-SAME:    %[[X:[^:]*]]: tensor<?x8xf32>, %[[W:[^:]*]]: tensor<?x1xf32>, %[[OUT:[^:]*]]: tensor<?x8xbf16>
// CHECK:         %[[Z:.*]] = linalg.generic
// CHECK-SAME:      ins(%[[X]], %[[W]] : tensor<?x8xf32>, tensor<?x1xf32>) outs(%[[OUT]] : tensor<?x8xbf16>)
// CHECK:           arith.truncf {{.*}} : f32 to bf16
// CHECK-NEXT:      arith.extf
// CHECK-NEXT:      arith.mulf
// CHECK-NEXT:      arith.truncf
// CHECK-NEXT:      linalg.yield
// CHECK-NOT:     linalg.generic
// CHECK:         return %[[Z]]
#id = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0, 0)>
func.func @fuses_a_chain(%x: tensor<?x8xf32>, %w: tensor<?x1xf32>, %out: tensor<?x8xbf16>) -> tensor<?x8xbf16> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e0 = tensor.empty(%n) : tensor<?x8xbf16>
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<?x8xf32>) outs(%e0 : tensor<?x8xbf16>) {
  ^bb0(%in: f32, %o: bf16):
    %0 = arith.truncf %in : f32 to bf16
    linalg.yield %0 : bf16
  } -> tensor<?x8xbf16>
  %e1 = tensor.empty(%n) : tensor<?x8xf32>
  %b = linalg.generic {indexing_maps = [#id, #row, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a, %w : tensor<?x8xbf16>, tensor<?x1xf32>) outs(%e1 : tensor<?x8xf32>) {
  ^bb0(%in: bf16, %s: f32, %o: f32):
    %0 = arith.extf %in : bf16 to f32
    %1 = arith.mulf %0, %s : f32
    linalg.yield %1 : f32
  } -> tensor<?x8xf32>
  %z = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%b : tensor<?x8xf32>) outs(%out : tensor<?x8xbf16>) {
  ^bb0(%in: f32, %o: bf16):
    %0 = arith.truncf %in : f32 to bf16
    linalg.yield %0 : bf16
  } -> tensor<?x8xbf16>
  return %z : tensor<?x8xbf16>
}

// -----

// Squares are taken where they are summed, also in a sum with one more loop of
// one iteration.

// CHECK-LABEL: func @fuses_into_sums
// CHECK-SAME:    %[[X:[^:]*]]: tensor<?x8xf32>
// CHECK:         %[[S:.*]] = linalg.generic
// CHECK-SAME:      iterator_types = ["parallel", "parallel", "reduction"]
// CHECK-SAME:      ins(%[[X]] : tensor<?x8xf32>)
// CHECK:           arith.mulf
// CHECK-NEXT:      arith.addf
// CHECK-NOT:     linalg.generic
// CHECK:         return %[[S]]
#id = affine_map<(d0, d1) -> (d0, d1)>
#read = affine_map<(d0, d1, d2) -> (d0, d2)>
#sum = affine_map<(d0, d1, d2) -> (d0, d1)>
func.func @fuses_into_sums(%x: tensor<?x8xf32>, %e: tensor<?x8xf32>, %zeros: tensor<?x1xf32>) -> tensor<?x1xf32> {
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<?x8xf32>) outs(%e : tensor<?x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.mulf %in, %in : f32
    linalg.yield %0 : f32
  } -> tensor<?x8xf32>
  %s = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a : tensor<?x8xf32>) outs(%zeros : tensor<?x1xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.addf %o, %in : f32
    linalg.yield %0 : f32
  } -> tensor<?x1xf32>
  return %s : tensor<?x1xf32>
}

// -----

// Where a result is read several times for each of its elements, or by two ops,
// it would be computed again.

// CHECK-LABEL: func @keeps_what_is_read_twice
// CHECK-COUNT-4: linalg.generic
#id = affine_map<(d0, d1) -> (d0, d1)>
#vector = affine_map<(d0) -> (d0)>
#column = affine_map<(d0, d1) -> (d0)>
func.func @keeps_what_is_read_twice(%x: tensor<4x8xf32>, %w: tensor<4xf32>, %e: tensor<4x8xf32>, %e1: tensor<4xf32>)
    -> (tensor<4x8xf32>, tensor<4x8xf32>) {
  %v = linalg.generic {indexing_maps = [#vector, #vector], iterator_types = ["parallel"]}
      ins(%w : tensor<4xf32>) outs(%e1 : tensor<4xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = math.exp %in : f32
    linalg.yield %0 : f32
  } -> tensor<4xf32>
  %a = linalg.generic {indexing_maps = [#id, #column, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x, %v : tensor<4x8xf32>, tensor<4xf32>) outs(%e : tensor<4x8xf32>) {
  ^bb0(%in: f32, %s: f32, %o: f32):
    %0 = arith.mulf %in, %s : f32
    linalg.yield %0 : f32
  } -> tensor<4x8xf32>
  %b = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x8xf32>) outs(%e : tensor<4x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.negf %in : f32
    linalg.yield %0 : f32
  } -> tensor<4x8xf32>
  %c = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<4x8xf32>) outs(%e : tensor<4x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = math.absf %in : f32
    linalg.yield %0 : f32
  } -> tensor<4x8xf32>
  return %b, %c : tensor<4x8xf32>, tensor<4x8xf32>
}

// -----

// Elements that do not lie next to each other are read in an op of their own:
// every second one, and those of a transposed tensor.

// CHECK-LABEL: func @keeps_strided_reads
// CHECK-COUNT-4: linalg.generic
#id = affine_map<(d0, d1) -> (d0, d1)>
#transposed = affine_map<(d0, d1) -> (d1, d0)>
func.func @keeps_strided_reads(%x: tensor<8x16xf32>, %y: tensor<8x8xf32>, %e: tensor<8x8xf32>)
    -> (tensor<8x8xf32>, tensor<8x8xf32>) {
  %odd = tensor.extract_slice %x[0, 1] [8, 8] [1, 2] : tensor<8x16xf32> to tensor<8x8xf32>
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%odd : tensor<8x8xf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.negf %in : f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  %b = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<8x8xf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = math.exp %in : f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  %c = linalg.generic {indexing_maps = [#transposed, #id], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<8x8xf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.negf %in : f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  %d = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%c : tensor<8x8xf32>) outs(%e : tensor<8x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = math.exp %in : f32
    linalg.yield %0 : f32
  } -> tensor<8x8xf32>
  return %b, %d : tensor<8x8xf32>, tensor<8x8xf32>
}

// -----

// A body with an assertion, or with an index, is no element by element one.

// CHECK-LABEL: func @keeps_checks
// CHECK-COUNT-2: linalg.generic
#id = affine_map<(d0) -> (d0)>
func.func @keeps_checks(%x: tensor<8xi64>, %e: tensor<8xi64>, %o: tensor<8xi64>) -> tensor<8xi64> {
  %c8 = arith.constant 8 : i64
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%x : tensor<8xi64>) outs(%e : tensor<8xi64>) {
  ^bb0(%in: i64, %out: i64):
    %ok = arith.cmpi slt, %in, %c8 : i64
    cf.assert %ok, "expected less than 8"
    linalg.yield %in : i64
  } -> tensor<8xi64>
  %b = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%a : tensor<8xi64>) outs(%o : tensor<8xi64>) {
  ^bb0(%in: i64, %out: i64):
    %0 = arith.addi %in, %c8 : i64
    linalg.yield %0 : i64
  } -> tensor<8xi64>
  return %b : tensor<8xi64>
}

// -----

// A product keeps its operands, also where one row of a weight reads each
// element once; and a sum of products does not become one.

// CHECK-LABEL: func @neither_changes_nor_makes_products
// CHECK:         linalg.generic {{.*}} iterator_types = ["parallel", "parallel"]
// CHECK:           arith.negf
// CHECK:         linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "reduction"]
// CHECK:           arith.mulf
// CHECK-NEXT:      arith.addf
// CHECK:         linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "parallel"]
// CHECK:           arith.mulf
// CHECK-NEXT:      linalg.yield
// CHECK:         linalg.generic {{.*}} iterator_types = ["parallel", "reduction", "parallel"]
// CHECK-NEXT:    ^bb0
// CHECK-NEXT:      arith.addf
#id = affine_map<(d0, d1) -> (d0, d1)>
#lhs = affine_map<(d0, d1, d2) -> (d0, d2)>
#rhs = affine_map<(d0, d1, d2) -> (d1, d2)>
#out = affine_map<(d0, d1, d2) -> (d0, d1)>
#streams = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
func.func @neither_changes_nor_makes_products(%x: tensor<4x8xf32>, %w: tensor<1x8xf32>, %e: tensor<4x8xf32>,
    %y: tensor<4x2x8xf32>, %s: tensor<4x2xf32>, %e3: tensor<4x2x8xf32>, %z1: tensor<4x1xf32>, %z2: tensor<4x8xf32>)
    -> (tensor<4x1xf32>, tensor<4x8xf32>) {
  %a = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x8xf32>) outs(%e : tensor<4x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.negf %in : f32
    linalg.yield %0 : f32
  } -> tensor<4x8xf32>
  %p = linalg.generic {indexing_maps = [#lhs, #rhs, #out], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %w : tensor<4x8xf32>, tensor<1x8xf32>) outs(%z1 : tensor<4x1xf32>) {
  ^bb0(%l: f32, %r: f32, %o: f32):
    %0 = arith.mulf %l, %r : f32
    %1 = arith.addf %o, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<4x1xf32>
  %m = linalg.generic {indexing_maps = [#streams, #out, #streams], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%y, %s : tensor<4x2x8xf32>, tensor<4x2xf32>) outs(%e3 : tensor<4x2x8xf32>) {
  ^bb0(%l: f32, %r: f32, %o: f32):
    %0 = arith.mulf %l, %r : f32
    linalg.yield %0 : f32
  } -> tensor<4x2x8xf32>
  %t = linalg.generic {indexing_maps = [#streams, #lhs], iterator_types = ["parallel", "reduction", "parallel"]}
      ins(%m : tensor<4x2x8xf32>) outs(%z2 : tensor<4x8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.addf %o, %in : f32
    linalg.yield %0 : f32
  } -> tensor<4x8xf32>
  return %p, %t : tensor<4x1xf32>, tensor<4x8xf32>
}

// -----

// An op that adds to the elements of its output (a sum over a dim of size 1)
// reads them too; it is no producer, and stays a reader.

// CHECK-LABEL: func @what_adds_to_its_output_stays
// CHECK:         %[[SUM:.*]] = linalg.generic
// CHECK-SAME:      ins(%{{.*}} : tensor<8xi64>) outs(%{{.*}} : tensor<8xi64>)
// CHECK:           arith.muli
// CHECK-NEXT:      arith.addi
// CHECK:         linalg.generic
// CHECK-SAME:      ins(%[[SUM]] : tensor<8xi64>)
// CHECK:           arith.negf
#v = affine_map<(d0) -> (d0)>
func.func @what_adds_to_its_output_stays(%x: tensor<8xi64>, %z: tensor<8xi64>, %e: tensor<8xf32>) -> tensor<8xf32> {
  %square = linalg.generic {indexing_maps = [#v, #v], iterator_types = ["parallel"]}
      ins(%x : tensor<8xi64>) outs(%z : tensor<8xi64>) {
  ^bb0(%in: i64, %out: i64):
    %0 = arith.muli %in, %in : i64
    linalg.yield %0 : i64
  } -> tensor<8xi64>
  %sum = linalg.generic {indexing_maps = [#v, #v], iterator_types = ["parallel"]}
      ins(%square : tensor<8xi64>) outs(%z : tensor<8xi64>) {
  ^bb0(%in: i64, %out: i64):
    %0 = arith.addi %out, %in : i64
    linalg.yield %0 : i64
  } -> tensor<8xi64>
  %float = linalg.generic {indexing_maps = [#v, #v], iterator_types = ["parallel"]}
      ins(%sum : tensor<8xi64>) outs(%e : tensor<8xf32>) {
  ^bb0(%in: i64, %out: f32):
    %0 = arith.sitofp %in : i64 to f32
    %1 = arith.negf %0 : f32
    linalg.yield %1 : f32
  } -> tensor<8xf32>
  return %float : tensor<8xf32>
}
