// RUN: moe-opt %s --convert-moe-to-cpu --verify-diagnostics

func.func @expects_buffers(%rows: tensor<512x32xf32>, %g: tensor<256x2xf32>,
    %s: tensor<256x2xi32>, %y0: tensor<256x32xf32>) -> tensor<256x32xf32> {
  // expected-error @below {{expected buffers with contiguous rows and a static k}}
  %y = moe.combine ins(%rows, %g, %s : tensor<512x32xf32>, tensor<256x2xf32>, tensor<256x2xi32>)
      outs(%y0 : tensor<256x32xf32>) -> tensor<256x32xf32>
  return %y : tensor<256x32xf32>
}
