// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90 --moe-tile-and-fuse --remarks-filter-missed='moe-.*' -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// Which sums are the least: each is compared with all. One that is computed in
// the tile and for all others apart could round in two orders, and come before
// itself.

// CHECK: Reason="it is compared with itself, and two tiles of it could round in two orders", Remark="{{.*}} not fused into linalg.generic"

// IR-LABEL: func @keeps_sums_that_are_compared_with_each_other
// IR:         scf.forall
// IR:           arith.addf
// IR:         scf.forall
// IR-NOT:       arith.addf
// IR:           arith.cmpf
func.func @keeps_sums_that_are_compared_with_each_other(
    %x: tensor<256x32xf32>, %s0: tensor<256xf32>, %b0: tensor<256xi1>) -> tensor<256xi1> {
  %sums = linalg.generic {
      indexing_maps = [affine_map<(h, n) -> (h, n)>, affine_map<(h, n) -> (h)>],
      iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<256x32xf32>) outs(%s0 : tensor<256xf32>) {
  ^bb0(%in: f32, %acc: f32):
    %sum = arith.addf %acc, %in : f32
    linalg.yield %sum : f32
  } -> tensor<256xf32>
  %before = linalg.generic {
      indexing_maps = [affine_map<(h, g) -> (h)>, affine_map<(h, g) -> (g)>,
                       affine_map<(h, g) -> (h)>],
      iterator_types = ["parallel", "reduction"]}
      ins(%sums, %sums : tensor<256xf32>, tensor<256xf32>) outs(%b0 : tensor<256xi1>) {
  ^bb0(%own: f32, %other: f32, %acc: i1):
    %less = arith.cmpf olt, %other, %own : f32
    %any = arith.ori %acc, %less : i1
    linalg.yield %any : i1
  } -> tensor<256xi1>
  return %before : tensor<256xi1>
}

// A sum of residuals that a norm and a later layer read: one loop computes and
// stores both. Rows of 2048 elements come in fours.

// IR-LABEL: func @residual_and_norm
// IR:         scf.forall (%{{.*}}) = (0) to (%{{.*}}) step (4) shared_outs(%{{.*}} = %{{.*}}, %{{.*}} = %{{.*}}) -> (tensor<?x2048xf32>, tensor<?x2048xf32>)
// IR:           arith.addf
// IR:           arith.mulf
// IR:           math.rsqrt
// IR:           scf.forall.in_parallel
// IR-NOT:     scf.forall (
// IR:         return
func.func @residual_and_norm(%x: tensor<?x2048xf32>, %y: tensor<?x2048xf32>)
    -> (tensor<?x2048xf32>, tensor<?x2048xf32>) {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %n = tensor.dim %x, %c0 : tensor<?x2048xf32>
  %rows = tensor.empty(%n) : tensor<?x2048xf32>
  %one = tensor.empty(%n) : tensor<?xf32>
  %sum = linalg.generic {
      indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>,
                       affine_map<(i, j) -> (i, j)>],
      iterator_types = ["parallel", "parallel"]}
      ins(%x, %y : tensor<?x2048xf32>, tensor<?x2048xf32>) outs(%rows : tensor<?x2048xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %0 = arith.addf %a, %b : f32
    linalg.yield %0 : f32
  } -> tensor<?x2048xf32>
  %none = linalg.fill ins(%zero : f32) outs(%one : tensor<?xf32>) -> tensor<?xf32>
  %squares = linalg.generic {
      indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>],
      iterator_types = ["parallel", "reduction"]}
      ins(%sum : tensor<?x2048xf32>) outs(%none : tensor<?xf32>) {
  ^bb0(%a: f32, %acc: f32):
    %0 = arith.mulf %a, %a : f32
    %1 = arith.addf %acc, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<?xf32>
  %normed = linalg.generic {
      indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i)>,
                       affine_map<(i, j) -> (i, j)>],
      iterator_types = ["parallel", "parallel"]}
      ins(%sum, %squares : tensor<?x2048xf32>, tensor<?xf32>) outs(%rows : tensor<?x2048xf32>) {
  ^bb0(%a: f32, %s: f32, %out: f32):
    %0 = math.rsqrt %s : f32
    %1 = arith.mulf %a, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<?x2048xf32>
  return %sum, %normed : tensor<?x2048xf32>, tensor<?x2048xf32>
}

// Equal checks of one input are made once.

// IR-LABEL: func @checks
// IR-COUNT-1: moe.assert
// IR-NOT:     moe.assert
func.func @checks(%i: tensor<8xi64>) -> (tensor<8xi64>, tensor<8xi64>) {
  %zero = arith.constant 0 : i64
  %e = tensor.empty() : tensor<8xi64>
  %a = linalg.generic {
      indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%i : tensor<8xi64>) outs(%e : tensor<8xi64>) {
  ^bb0(%x: i64, %out: i64):
    %is = arith.cmpi sge, %x, %zero : i64
    moe.assert <index> %is, "expected at least 0, found {0}" (%x : i64)
    linalg.yield %x : i64
  } -> tensor<8xi64>
  %b = linalg.generic {
      indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>], iterator_types = ["parallel"]}
      ins(%i : tensor<8xi64>) outs(%e : tensor<8xi64>) {
  ^bb0(%x: i64, %out: i64):
    %is = arith.cmpi sge, %x, %zero : i64
    moe.assert <index> %is, "expected at least 0, found {0}" (%x : i64)
    linalg.yield %x : i64
  } -> tensor<8xi64>
  return %a, %b : tensor<8xi64>, tensor<8xi64>
}

// A body reads rows of other tiles: what it reads is computed before, once.

// IR-LABEL: func @body_that_reads_other_rows
// IR-COUNT-1: math.exp
// IR-NOT:     math.exp
// IR:         tensor.extract
func.func @body_that_reads_other_rows(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x64xf32>
  %e = tensor.empty(%n) : tensor<?x64xf32>
  %p = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<?x64xf32>) outs(%e : tensor<?x64xf32>) {
  ^bb0(%a: f32, %o: f32):
    %0 = math.exp %a : f32
    linalg.yield %0 : f32
  } -> tensor<?x64xf32>
  %g = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]}
      ins(%p : tensor<?x64xf32>) outs(%e : tensor<?x64xf32>) {
  ^bb0(%a: f32, %o: f32):
    %i = linalg.index 0 : index
    %c1 = arith.constant 1 : index
    %z = arith.constant 0 : index
    %before = arith.subi %i, %c1 : index
    %k = arith.maxsi %before, %z : index
    %j = linalg.index 1 : index
    %b = tensor.extract %p[%k, %j] : tensor<?x64xf32>
    %0 = arith.addf %a, %b : f32
    linalg.yield %0 : f32
  } -> tensor<?x64xf32>
  return %g : tensor<?x64xf32>
}
