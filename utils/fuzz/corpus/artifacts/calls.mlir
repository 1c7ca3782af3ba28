// Seeds of the target `calls`: indices and divisors that are checked while the
// code runs, arguments that share a size, and an argument that is updated.
#vector = affine_map<(d0) -> (d0)>
#row = affine_map<(d0, d1) -> (d0)>
#matrix = affine_map<(d0, d1) -> (d0, d1)>

func.func @rows(%x: tensor<?x8xf32>, %i: tensor<?xi64>) -> tensor<?x8xf32> {
  %zero = arith.constant 0 : index
  %n = tensor.dim %x, %zero : tensor<?x8xf32>
  %k = tensor.dim %i, %zero : tensor<?xi64>
  %empty = tensor.empty(%k) : tensor<?xi64>
  %checked = linalg.generic {indexing_maps = [#vector, #vector], iterator_types = ["parallel"]}
      ins(%i : tensor<?xi64>) outs(%empty : tensor<?xi64>) {
  ^bb0(%at: i64, %unused: i64):
    %place = arith.index_cast %at : i64 to index
    %inside = arith.cmpi ult, %place, %n : index
    moe.assert <index> %inside, "expected an index less than {1}, found {0}" (%at, %n : i64, index)
    linalg.yield %at : i64
  } -> tensor<?xi64>
  %y = tensor.empty(%k) : tensor<?x8xf32>
  %taken = linalg.generic {indexing_maps = [#row, #matrix], iterator_types = ["parallel", "parallel"]}
      ins(%checked : tensor<?xi64>) outs(%y : tensor<?x8xf32>) {
  ^bb0(%at: i64, %unused: f32):
    %place = arith.index_cast %at : i64 to index
    %column = linalg.index 1 : index
    %value = tensor.extract %x[%place, %column] : tensor<?x8xf32>
    linalg.yield %value : f32
  } -> tensor<?x8xf32>
  return %taken : tensor<?x8xf32>
}

func.func @quotients(%i: tensor<?xi64>, %j: tensor<?xi64>) -> tensor<?xi64> {
  %zero = arith.constant 0 : index
  %none = arith.constant 0 : i64
  %minus = arith.constant -1 : i64
  %one = arith.constant 1 : i64
  %n = tensor.dim %i, %zero : tensor<?xi64>
  %empty = tensor.empty(%n) : tensor<?xi64>
  %q = linalg.generic {indexing_maps = [#vector, #vector, #vector], iterator_types = ["parallel"]}
      ins(%i, %j : tensor<?xi64>, tensor<?xi64>) outs(%empty : tensor<?xi64>) {
  ^bb0(%a: i64, %b: i64, %unused: i64):
    %divides = arith.cmpi ne, %b, %none : i64
    moe.assert <zero_division> %divides, "expected divisors other than 0, found 0"
    %is_minus = arith.cmpi eq, %b, %minus : i64
    %divisor = arith.select %is_minus, %one, %b : i64
    %quotient = arith.floordivsi %a, %divisor : i64
    %negated = arith.subi %none, %a : i64
    %result = arith.select %is_minus, %negated, %quotient : i64
    linalg.yield %result : i64
  } -> tensor<?xi64>
  return %q : tensor<?xi64>
}

func.func @select(%z: tensor<?x8xbf16>, %mask: tensor<?xi1>, %bias: tensor<8xbf16>)
    -> (tensor<?x3xf32>, tensor<?x3xi32>) {
  %zero = arith.constant 0 : index
  %n = tensor.dim %z, %zero : tensor<?x8xbf16>
  %g = tensor.empty(%n) : tensor<?x3xf32>
  %i = tensor.empty(%n) : tensor<?x3xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x8xbf16>) bias(%bias : tensor<8xbf16>)
      mask(%mask : tensor<?xi1>) outs(%g, %i : tensor<?x3xf32>, tensor<?x3xi32>)
      {score = #moe.score_function<sigmoid>} -> tensor<?x3xf32>, tensor<?x3xi32>
  return %r#0, %r#1 : tensor<?x3xf32>, tensor<?x3xi32>
}

func.func @counts(%i: tensor<?x2xi64>, %mask: tensor<?xi1>, %a: tensor<6x6xf32>)
    -> (tensor<6x6xi32>, tensor<6x6xf32>) {
  %none = arith.constant 0 : i32
  %d = tensor.empty() : tensor<6x6xi32>
  %c = linalg.fill ins(%none : i32) outs(%d : tensor<6x6xi32>) -> tensor<6x6xi32>
  %counts = moe.co_selections ins(%i : tensor<?x2xi64>) mask(%mask : tensor<?xi1>)
      outs(%c : tensor<6x6xi32>) -> tensor<6x6xi32>
  %e = tensor.empty() : tensor<6x6xf32>
  %next = moe.adjacency_update ins(%a, %i : tensor<6x6xf32>, tensor<?x2xi64>)
      outs(%e : tensor<6x6xf32>) -> tensor<6x6xf32>
  return %counts, %next : tensor<6x6xi32>, tensor<6x6xf32>
}
