// Seed of the target `calls`: a row is written into an argument, at a place
// that is checked while the code runs.
func.func @write(%cache: tensor<?x4xf32>, %row: tensor<1x4xf32>, %at: index)
    -> (tensor<?x4xf32> {moe.updates = 0 : i64}, tensor<1x4xf32>) {
  %zero = arith.constant 0 : index
  %n = tensor.dim %cache, %zero : tensor<?x4xf32>
  %inside = arith.cmpi ult, %at, %n : index
  moe.assert <index> %inside, "expected a place less than {1}, found {0}" (%at, %n : index, index)
  %before = tensor.extract_slice %cache[%at, 0] [1, 4] [1, 1] : tensor<?x4xf32> to tensor<1x4xf32>
  %empty = tensor.empty() : tensor<1x4xf32>
  %old = linalg.copy ins(%before : tensor<1x4xf32>) outs(%empty : tensor<1x4xf32>)
      -> tensor<1x4xf32>
  %written = tensor.insert_slice %row into %cache[%at, 0] [1, 4] [1, 1]
      : tensor<1x4xf32> into tensor<?x4xf32>
  return %written, %old : tensor<?x4xf32>, tensor<1x4xf32>
}
