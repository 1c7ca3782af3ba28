// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file --verify-diagnostics | FileCheck %s
// RUN: %moe-opt %s --convert-moe-to-cpu=vector-width=8 --split-input-file --verify-diagnostics | FileCheck %s --check-prefix=EIGHT

// Sixteen tokens a vector: rows come in by a transpose, the list of the k best
// is carried in registers and starts below every key.

// CHECK-LABEL: func @selects_one_token_a_lane
// CHECK-NOT:     moe.
// CHECK:         arith.constant dense<-2147483648> : vector<16xi32>
// CHECK-COUNT-16: vector.load %{{.*}} : memref<?x32xf32>, vector<16xf32>
// CHECK:         vector.shuffle
// CHECK:         arith.maxsi
// CHECK:         arith.minsi
// EIGHT-LABEL: func @selects_one_token_a_lane
// EIGHT-COUNT-8: vector.load %{{.*}} : memref<?x32xf32>, vector<8xf32>
func.func @selects_one_token_a_lane(%z: memref<?x32xf32>, %g: memref<?x2xf32>, %i: memref<?x2xi32>) {
  moe.topk_renorm ins(%z : memref<?x32xf32>) outs(%g, %i : memref<?x2xf32>, memref<?x2xi32>)
  return
}

// -----

// A softmax over the selected needs one exp a place, not one an expert.

// CHECK-LABEL: func @renormalises_with_k_exponentials
// CHECK-COUNT-3: math.exp
// CHECK-NOT:     math.exp
func.func @renormalises_with_k_exponentials(%z: memref<16x32xf32>, %g: memref<16x3xf32>, %i: memref<16x3xi32>) {
  moe.topk_renorm ins(%z : memref<16x32xf32>) outs(%g, %i : memref<16x3xf32>, memref<16x3xi32>)
  return
}

// -----

// Of many experts those enter the list that reach the third of sixteen maxima,
// NaN too. Where no instruction moves their lanes to the front, they are the
// set bits of a word, of which six are written without a look at how many are
// set.

// CHECK-LABEL: func @drops_most_experts_before_the_list
// CHECK:         memref.prefetch
// CHECK:         %[[SORTED:.*]] = vector.shuffle %{{.*}}, %{{.*}} [0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31]
// CHECK-NEXT:    %[[THIRD:.*]] = vector.extract %[[SORTED]][2]
// CHECK-NEXT:    %[[BOUND:.*]] = vector.broadcast %[[THIRD]]
// CHECK:         %[[STAYS:.*]] = arith.cmpf uge, %{{.*}}, %[[BOUND]]
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.experimental.vector.compress"(%{{.*}}, %[[STAYS]]
// CHECK:         vector.reduction <maxsi>
// EIGHT-LABEL: func @drops_most_experts_before_the_list
// EIGHT-NOT:     compress
// EIGHT:         %[[STAYS:.*]] = arith.cmpf uge
// EIGHT:         vector.bitcast %[[STAYS]] : vector<8xi1> to vector<1xi8>
// EIGHT:         arith.shli
// EIGHT-COUNT-6: math.cttz
// EIGHT:         %[[NUMBER:.*]] = math.ctpop
// EIGHT:         %[[END:.*]] = arith.index_cast %[[NUMBER]]
// EIGHT:         scf.for %{{.*}} to %[[END]]
// EIGHT:           math.cttz
func.func @drops_most_experts_before_the_list(%z: memref<?x64xf32>, %g: memref<?x3xf32>, %i: memref<?x3xi32>) {
  moe.topk_renorm ins(%z : memref<?x64xf32>) outs(%g, %i : memref<?x3xf32>, memref<?x3xi32>)
  return
}

// -----

// More than 8 places take two vectors of maxima.

// EIGHT-LABEL: func @bounds_more_places_by_more_maxima
// CHECK-LABEL: func @bounds_more_places_by_more_maxima
// CHECK:         vector.shuffle %[[LOW:.*]], %[[LOW]] [15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
// CHECK:         vector.extract %{{.*}}[11]
// CHECK:         arith.cmpf uge
func.func @bounds_more_places_by_more_maxima(%z: memref<?x100xf32>, %g: memref<?x12xf32>, %i: memref<?x12xi32>) {
  moe.topk_renorm ins(%z : memref<?x100xf32>) outs(%g, %i : memref<?x12xf32>, memref<?x12xi32>)
  return
}

// -----

// Of sixteen maxima in vectors of eight, the twelfth is among the smaller ones:
// the fourth of those.

// CHECK-LABEL: func @bounds_more_places_than_lanes
// EIGHT-LABEL: func @bounds_more_places_than_lanes
// EIGHT:         vector.shuffle %[[LOW:.*]], %[[LOW]] [7, 6, 5, 4, 3, 2, 1, 0]
// EIGHT-NEXT:    arith.cmpf olt
// EIGHT:         vector.extract %{{.*}}[3]
// EIGHT:         arith.cmpf uge
func.func @bounds_more_places_than_lanes(%z: memref<?x192xf32>, %g: memref<?x12xf32>, %i: memref<?x12xi32>) {
  moe.topk_renorm ins(%z : memref<?x192xf32>) outs(%g, %i : memref<?x12xf32>, memref<?x12xi32>)
  return
}

// -----

// More than 16 places are selected a token at a time: bounded below by maxima of
// groups, listed, cut where the list is long, and placed by counting.

// CHECK-LABEL: func @selects_many_places_by_row
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<32xvector<16xi32>>
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<80xi32>
// CHECK-DAG:     memref.alloca() {alignment = 64 : i64} : memref<16x48xi32>
// CHECK:         math.ctpop
// CHECK:         llvm.call_intrinsic "llvm.experimental.vector.compress"
// CHECK:         arith.cmpi sgt, %{{.*}}, %c86
// CHECK-NEXT:    scf.if
func.func @selects_many_places_by_row(%z: memref<16x64xf32>, %g: memref<16x22xf32>, %i: memref<16x22xi64>) {
  moe.topk_renorm ins(%z : memref<16x64xf32>) outs(%g, %i : memref<16x22xf32>, memref<16x22xi64>)
  return
}

// -----

// Of an unknown number of experts they live in a buffer, which a key enters that
// is above the last of them in some lane.

// CHECK-LABEL: func @keeps_many_places_in_a_buffer
// CHECK:         memref.alloca() {alignment = 64 : i64} : memref<22xvector<16xi32>>
// CHECK:         vector.reduction <or>
func.func @keeps_many_places_in_a_buffer(%z: memref<16x?xf32>, %g: memref<16x22xf32>, %i: memref<16x22xi64>) {
  moe.topk_renorm ins(%z : memref<16x?xf32>) outs(%g, %i : memref<16x22xf32>, memref<16x22xi64>)
  return
}

// -----

// A bias on scores stages the keys of the choice; the gates come from the unbiased scores.

// CHECK-LABEL: func @stages_the_choice_of_biased_scores
// CHECK:         %[[STAGE:.*]] = memref.alloca() {alignment = 64 : i64} : memref<32xvector<16xi32>>
// CHECK:         memref.store %{{.*}}, %[[STAGE]]
// CHECK:         memref.load %[[STAGE]]
func.func @stages_the_choice_of_biased_scores(%z: memref<16x32xbf16>, %b: memref<32xf32>, %g: memref<16x4xf32>, %i: memref<16x4xi32>) {
  moe.topk_renorm ins(%z : memref<16x32xbf16>) bias(%b : memref<32xf32>)
      outs(%g, %i : memref<16x4xf32>, memref<16x4xi32>)
      {score = #moe.score_function<sigmoid>, n_group = 4 : i64, topk_group = 2 : i64}
  return
}

// -----

func.func @expects_a_static_k(%z: memref<16x32xf32>, %g: memref<16x?xf32>, %i: memref<16x?xi32>) {
  // expected-error @below {{expected buffers with contiguous rows and a static k}}
  moe.topk_renorm ins(%z : memref<16x32xf32>) outs(%g, %i : memref<16x?xf32>, memref<16x?xi32>)
  return
}
