// RUN: %moe-opt %s --moe-decompose --canonicalize --cse | FileCheck %s

// Weights that are codes. What is checked are the points where a paraphrase
// would differ; the numbers are compared elsewhere.

// CHECK-NOT: moe.

// A code is unsigned, and that of an odd feature in the high half of its byte.
// 40 features are two groups of 32. The weight is scale (code - zero), in f32.

// CHECK-LABEL: func @int4
// CHECK-SAME:    %{{[^:]*}}: tensor<?x40xf32>, %[[W:[^:]*]]: tensor<8x4x20xi8>, %{{[^:]*}}: tensor<9xi32>, %[[S:[^:]*]]: tensor<8x4x2xbf16>, %[[Z:[^:]*]]: tensor<8x4x2xf32>
// CHECK-DAG:     %[[C2:.*]] = arith.constant 2 : index
// CHECK-DAG:     %[[C32:.*]] = arith.constant 32 : index
// CHECK-DAG:     %[[FOUR:.*]] = arith.constant 4 : i32
// CHECK-DAG:     %[[MASK:.*]] = arith.constant 15 : i32
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<8x4x40xf32>)
// CHECK-DAG:       %[[E:.*]] = linalg.index 0
// CHECK-DAG:       %[[F:.*]] = linalg.index 2
// CHECK-DAG:       %[[K:.*]] = linalg.index 1
// CHECK-DAG:       %[[C:.*]] = arith.divui %[[K]], %[[C2]] : index
// CHECK:           %[[BYTE:.*]] = tensor.extract %[[W]][%[[E]], %[[F]], %[[C]]]
// CHECK:           %[[WORD:.*]] = arith.extui %[[BYTE]] : i8 to i32
// CHECK:           %[[ODD:.*]] = arith.remui %[[K]], %[[C2]] : index
// CHECK:           %[[HIGH:.*]] = arith.index_cast %[[ODD]] : index to i32
// CHECK:           %[[SHIFT:.*]] = arith.muli %[[HIGH]], %[[FOUR]] : i32
// CHECK:           %[[SHIFTED:.*]] = arith.shrui %[[WORD]], %[[SHIFT]] : i32
// CHECK:           %[[CODE:.*]] = arith.andi %[[SHIFTED]], %[[MASK]] : i32
// CHECK:           %[[U:.*]] = arith.divui %[[K]], %[[C32]] : index
// CHECK:           %[[NARROW:.*]] = tensor.extract %[[S]][%[[E]], %[[F]], %[[U]]]
// CHECK:           %[[SCALE:.*]] = arith.extf %[[NARROW]] : bf16 to f32
// CHECK:           %[[ZERO:.*]] = tensor.extract %[[Z]][%[[E]], %[[F]], %[[U]]]
// CHECK:           %[[NUMBER:.*]] = arith.sitofp %[[CODE]] : i32 to f32
// CHECK:           %[[DIFFERENCE:.*]] = arith.subf %[[NUMBER]], %[[ZERO]] : f32
// CHECK:           arith.mulf %[[SCALE]], %[[DIFFERENCE]] : f32
func.func @int4(%x: tensor<?x40xf32>, %w: tensor<8x4x20xi8>, %o: tensor<9xi32>,
                %s: tensor<8x4x2xbf16>, %z: tensor<8x4x2xf32>, %y: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xf32>, tensor<8x4x20xi8>, tensor<9xi32>)
      scales(%s : tensor<8x4x2xbf16>) zeros(%z : tensor<8x4x2xf32>) outs(%y : tensor<?x4xf32>)
      {format = #moe.weight_format<int4>, group = 32} -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}

// In panels the features 8t to 8t + 3 are in low halves, the four behind them in
// high ones. Scales lie in panels, too. Without zeros a code of 8 is 0.

// CHECK-LABEL: func @int4_panels
// CHECK-SAME:    %{{[^:]*}}: tensor<?x40xf32>, %[[W:[^:]*]]: tensor<8x2x8x5x4xi8>, %{{[^:]*}}: tensor<9xi32>, %[[S:[^:]*]]: tensor<8x2x2x5xf32>
// CHECK-DAG:     %[[C4:.*]] = arith.constant 4 : index
// CHECK-DAG:     %[[C5:.*]] = arith.constant 5 : index
// CHECK-DAG:     %[[C8:.*]] = arith.constant 8 : index
// CHECK-DAG:     %[[C32:.*]] = arith.constant 32 : index
// CHECK-DAG:     %[[ZERO:.*]] = arith.constant 8.0{{0*}}e+00 : f32
// CHECK:           %[[T:.*]] = arith.divui %[[K:.*]], %[[C8]] : index
// CHECK:           %[[P:.*]] = arith.divui %[[F:.*]], %[[C5]] : index
// CHECK:           %[[Q:.*]] = arith.remui %[[F]], %[[C5]] : index
// CHECK:           %[[STEP:.*]] = arith.remui %[[K]], %[[C4]] : index
// CHECK:           tensor.extract %[[W]][%[[E:.*]], %[[P]], %[[T]], %[[Q]], %[[STEP]]]
// CHECK:           %[[IN_8:.*]] = arith.remui %[[K]], %[[C8]] : index
// CHECK:           %[[IS_HIGH:.*]] = arith.divui %[[IN_8]], %[[C4]] : index
// CHECK:           arith.index_cast %[[IS_HIGH]] : index to i32
// CHECK:           %[[U:.*]] = arith.divui %[[K]], %[[C32]] : index
// CHECK:           tensor.extract %[[S]][%[[E]], %[[P]], %[[U]], %[[Q]]]
// CHECK:           arith.subf %{{.*}}, %[[ZERO]] : f32
func.func @int4_panels(%x: tensor<?x40xf32>, %w: tensor<8x2x8x5x4xi8>, %o: tensor<9xi32>,
                       %s: tensor<8x2x2x5xf32>, %y: tensor<?x6xf32>) -> tensor<?x6xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xf32>, tensor<8x2x8x5x4xi8>, tensor<9xi32>)
      scales(%s : tensor<8x2x2x5xf32>) outs(%y : tensor<?x6xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 5} -> tensor<?x6xf32>
  return %r : tensor<?x6xf32>
}

// A byte of 8 bits is one code, of which 128 is 0. Without a group the scale is
// the first one of a feature. The factors of gates lie behind the gates of their
// panel: feature 3 + 2p + i is column 2 + i of panel p, in codes and scales.

// CHECK-LABEL: func @int8_halves
// CHECK-SAME:    %{{[^:]*}}: tensor<?x40xf32>, %[[W:[^:]*]]: tensor<8x2x16x4x4xi8>, %{{[^:]*}}: tensor<9xi32>, %[[S:[^:]*]]: tensor<8x2x1x4xf32>
// CHECK-DAG:     %[[C0:.*]] = arith.constant 0 : index
// CHECK-DAG:     %[[C2:.*]] = arith.constant 2 : index
// CHECK-DAG:     %[[C3:.*]] = arith.constant 3 : index
// CHECK-DAG:     %[[C4:.*]] = arith.constant 4 : index
// CHECK-DAG:     %[[ZERO:.*]] = arith.constant 1.28{{0*}}e+02 : f32
// CHECK:           %[[T:.*]] = arith.divui %[[K:.*]], %[[C4]] : index
// CHECK:           %[[IS_FACTOR:.*]] = arith.cmpi uge, %[[F:.*]], %[[C3]] : index
// CHECK:           %[[FIRST:.*]] = arith.select %[[IS_FACTOR]], %[[C3]], %[[C0]] : index
// CHECK:           %[[PLACE:.*]] = arith.subi %[[F]], %[[FIRST]] : index
// CHECK:           %[[P:.*]] = arith.divui %[[PLACE]], %[[C2]] : index
// CHECK:           %[[LANE:.*]] = arith.remui %[[PLACE]], %[[C2]] : index
// CHECK:           %[[BEHIND:.*]] = arith.select %[[IS_FACTOR]], %[[C2]], %[[C0]] : index
// CHECK:           %[[Q:.*]] = arith.addi %[[LANE]], %[[BEHIND]] : index
// CHECK:           %[[STEP:.*]] = arith.remui %[[K]], %[[C4]] : index
// CHECK:           %[[BYTE:.*]] = tensor.extract %[[W]][%[[E:.*]], %[[P]], %[[T]], %[[Q]], %[[STEP]]]
// CHECK:           %[[CODE:.*]] = arith.extui %[[BYTE]] : i8 to i32
// CHECK:           tensor.extract %[[S]][%[[E]], %[[P]], %[[C0]], %[[Q]]]
// CHECK:           %[[NUMBER:.*]] = arith.sitofp %[[CODE]] : i32 to f32
// CHECK:           arith.subf %[[NUMBER]], %[[ZERO]] : f32
func.func @int8_halves(%x: tensor<?x40xf32>, %w: tensor<8x2x16x4x4xi8>, %o: tensor<9xi32>,
                       %s: tensor<8x2x1x4xf32>, %y: tensor<?x3xf32>) -> tensor<?x3xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xf32>, tensor<8x2x16x4x4xi8>, tensor<9xi32>)
      scales(%s : tensor<8x2x1x4xf32>) outs(%y : tensor<?x3xf32>)
      {format = #moe.weight_format<int8>, packed = 4, gate = #moe.gate<concatenated>}
      -> tensor<?x3xf32>
  return %r : tensor<?x3xf32>
}

// Of 6 bits 16 features take three steps of bytes. Two have the lower halves of
// codes, the third the upper 2 bits of all four features of a byte.

// CHECK-LABEL: func @int6
// CHECK-SAME:    %{{[^:]*}}: tensor<?x40xf32>, %[[W:[^:]*]]: tensor<8x4x36xi8>
// CHECK-DAG:     %[[C3:.*]] = arith.constant 3 : index
// CHECK-DAG:     %[[C4:.*]] = arith.constant 4 : index
// CHECK-DAG:     %[[C8:.*]] = arith.constant 8 : index
// CHECK-DAG:     %[[C16:.*]] = arith.constant 16 : index
// CHECK-DAG:     %[[MASK:.*]] = arith.constant 3 : i32
// CHECK-DAG:     %[[SIXTEEN:.*]] = arith.constant 16 : i32
// CHECK-DAG:     %[[ZERO:.*]] = arith.constant 3.2{{0*}}e+01 : f32
// CHECK:           %[[SET:.*]] = arith.divui %[[K:.*]], %[[C16]] : index
// CHECK:           %[[FIRST:.*]] = arith.muli %[[SET]], %[[C3]] : index
// CHECK:           %[[IN_SET:.*]] = arith.remui %[[K]], %[[C16]] : index
// CHECK:           %[[STEP:.*]] = arith.divui %[[IN_SET]], %[[C8]] : index
// CHECK:           %[[LINE:.*]] = arith.addi %[[FIRST]], %[[STEP]] : index
// CHECK-DAG:       %[[AT:.*]] = arith.muli %[[LINE]], %[[C4]] : index
// CHECK-DAG:       %[[S:.*]] = arith.remui %[[K]], %[[C4]] : index
// CHECK:           %[[BYTE:.*]] = arith.addi %[[AT]], %[[S]] : index
// CHECK:           tensor.extract %[[W]][%{{.*}}, %{{.*}}, %[[BYTE]]]
// CHECK:           %[[LOW:.*]] = arith.andi
// CHECK:           %[[UPPER:.*]] = arith.andi %{{.*}}, %[[MASK]] : i32
// CHECK:           %[[HIGH:.*]] = arith.muli %[[UPPER]], %[[SIXTEEN]] : i32
// CHECK:           arith.addi %[[LOW]], %[[HIGH]] : i32
// CHECK:           arith.subf %{{.*}}, %[[ZERO]] : f32
func.func @int6(%x: tensor<?x40xf32>, %w: tensor<8x4x36xi8>, %o: tensor<9xi32>,
                %s: tensor<8x4x3xf32>, %y: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xf32>, tensor<8x4x36xi8>, tensor<9xi32>)
      scales(%s : tensor<8x4x3xf32>) outs(%y : tensor<?x4xf32>)
      {format = #moe.weight_format<int6>, group = 16} -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}

// Of two levels a scale is a signed byte times an f16, of which each 256 features
// have two bytes behind their 8. What stands for a zero is a minimum.

// CHECK-LABEL: func @two_levels
// CHECK-SAME:    %[[S:[^:]*]]: tensor<8x4x20xi8>, %[[Z:[^:]*]]: tensor<8x4x20xi8>
// CHECK-DAG:     %[[C10:.*]] = arith.constant 10 : index
// CHECK-DAG:     %[[C32:.*]] = arith.constant 32 : index
// CHECK-DAG:     %[[C256:.*]] = arith.constant 256 : index
// CHECK-DAG:     %[[EIGHT:.*]] = arith.constant 8 : i16
// CHECK:           %[[BLOCK:.*]] = arith.divui %[[K:.*]], %[[C256]] : index
// CHECK:           %[[FIRST:.*]] = arith.muli %[[BLOCK]], %[[C10]] : index
// CHECK:           %[[IN_BLOCK:.*]] = arith.remui %[[K]], %[[C256]] : index
// CHECK:           %[[NUMBER:.*]] = arith.divui %[[IN_BLOCK]], %[[C32]] : index
// CHECK:           %[[U:.*]] = arith.addi %[[FIRST]], %[[NUMBER]] : index
// CHECK:           %[[BYTE:.*]] = tensor.extract %[[S]][%{{.*}}, %{{.*}}, %[[U]]]
// CHECK:           %[[STEP:.*]] = arith.sitofp %[[BYTE]] : i8 to f32
// CHECK:           %[[HIGH:.*]] = arith.shli %{{.*}}, %[[EIGHT]] : i16
// CHECK:           %[[BITS:.*]] = arith.ori %[[HIGH]], %{{.*}} : i16
// CHECK:           %[[HALF:.*]] = arith.bitcast %[[BITS]] : i16 to f16
// CHECK:           %[[UNIT:.*]] = arith.extf %[[HALF]] : f16 to f32
// CHECK:           %[[SCALE:.*]] = arith.mulf %[[STEP]], %[[UNIT]] : f32
// CHECK:           tensor.extract %[[Z]]
// CHECK:           %[[MINIMUM:.*]] = arith.mulf
// CHECK:           %[[PRODUCT:.*]] = arith.mulf %[[SCALE]], %{{.*}} : f32
// CHECK:           arith.subf %[[PRODUCT]], %[[MINIMUM]] : f32
func.func @two_levels(%s: tensor<8x4x20xi8>, %z: tensor<8x4x20xi8>, %x: tensor<?x300xf32>,
                      %w: tensor<8x4x150xi8>, %o: tensor<9xi32>, %y: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x300xf32>, tensor<8x4x150xi8>, tensor<9xi32>)
      scales(%s : tensor<8x4x20xi8>) zeros(%z : tensor<8x4x20xi8>) outs(%y : tensor<?x4xf32>)
      {format = #moe.weight_format<int4>, group = 32} -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}

// Of a float of 4 bits with magnitude m the value is m / 2 below 4, m - 2 below
// 6, else 2m - 8; codes from 8 on are negative.

// CHECK-LABEL: func @fp4
// CHECK-DAG:     %[[C4:.*]] = arith.constant 4 : i32
// CHECK-DAG:     %[[C6:.*]] = arith.constant 6 : i32
// CHECK-DAG:     %[[C7:.*]] = arith.constant 7 : i32
// CHECK-DAG:     %[[C8:.*]] = arith.constant 8 : i32
// CHECK-DAG:     %[[C15:.*]] = arith.constant 15 : i32
// CHECK-DAG:     %[[HALF:.*]] = arith.constant 5.0{{0*}}e-01 : f32
// CHECK-DAG:     %[[TWO:.*]] = arith.constant 2.0{{0*}}e+00 : f32
// CHECK-DAG:     %[[EIGHT:.*]] = arith.constant 8.0{{0*}}e+00 : f32
// CHECK:           %[[CODE:.*]] = arith.andi %{{.*}}, %[[C15]] : i32
// CHECK:           %[[SCALE:.*]] = tensor.extract %{{.*}} : tensor<8x4x1xf32>
// CHECK:           %[[M:.*]] = arith.andi %[[CODE]], %[[C7]] : i32
// CHECK:           %[[MAGNITUDE:.*]] = arith.sitofp %[[M]] : i32 to f32
// CHECK-DAG:       %[[SMALL:.*]] = arith.mulf %[[MAGNITUDE]], %[[HALF]] : f32
// CHECK-DAG:       %[[MIDDLE:.*]] = arith.subf %[[MAGNITUDE]], %[[TWO]] : f32
// CHECK-DAG:       %[[TWICE:.*]] = arith.mulf %[[MAGNITUDE]], %[[TWO]] : f32
// CHECK-DAG:       %[[LARGE:.*]] = arith.subf %[[TWICE]], %[[EIGHT]] : f32
// CHECK-DAG:       %[[IS_MIDDLE:.*]] = arith.cmpi slt, %[[M]], %[[C6]] : i32
// CHECK-DAG:       %[[NOT_SMALL:.*]] = arith.select %[[IS_MIDDLE]], %[[MIDDLE]], %[[LARGE]] : f32
// CHECK-DAG:       %[[IS_SMALL:.*]] = arith.cmpi slt, %[[M]], %[[C4]] : i32
// CHECK:           %[[VALUE:.*]] = arith.select %[[IS_SMALL]], %[[SMALL]], %[[NOT_SMALL]] : f32
// CHECK-DAG:       %[[NEGATIVE:.*]] = arith.negf %[[VALUE]] : f32
// CHECK-DAG:       %[[IS_POSITIVE:.*]] = arith.cmpi slt, %[[CODE]], %[[C8]] : i32
// CHECK:           %[[SIGNED:.*]] = arith.select %[[IS_POSITIVE]], %[[VALUE]], %[[NEGATIVE]] : f32
// CHECK:           arith.mulf %[[SCALE]], %[[SIGNED]] : f32
func.func @fp4(%x: tensor<?x40xf32>, %w: tensor<8x4x20xi8>, %o: tensor<9xi32>,
               %s: tensor<8x4x1xf32>, %y: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xf32>, tensor<8x4x20xi8>, tensor<9xi32>)
      scales(%s : tensor<8x4x1xf32>) outs(%y : tensor<?x4xf32>)
      {format = #moe.weight_format<fp4_e2m1>} -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}

// The exponent and mantissa of a float of 8 bits are those of a float of 32,
// whose exponent is 120 more. Below 8 there is no exponent: multiples of 2^-9.

// CHECK-LABEL: func @fp8
// CHECK-DAG:     %[[C8:.*]] = arith.constant 8 : i32
// CHECK-DAG:     %[[C20:.*]] = arith.constant 20 : i32
// CHECK-DAG:     %[[C127:.*]] = arith.constant 127 : i32
// CHECK-DAG:     %[[C128:.*]] = arith.constant 128 : i32
// CHECK-DAG:     %[[EXPONENT:.*]] = arith.constant 1006632960 : i32
// CHECK-DAG:     %[[LEAST:.*]] = arith.constant 0.001953125 : f32
// CHECK:           %[[CODE:.*]] = arith.extui %{{.*}} : i8 to i32
// CHECK:           %[[M:.*]] = arith.andi %[[CODE]], %[[C127]] : i32
// CHECK-DAG:       %[[SHIFTED:.*]] = arith.shli %[[M]], %[[C20]] : i32
// CHECK-DAG:       %[[BITS:.*]] = arith.addi %[[SHIFTED]], %[[EXPONENT]] : i32
// CHECK-DAG:       %[[NORMAL:.*]] = arith.bitcast %[[BITS]] : i32 to f32
// CHECK-DAG:       %[[MAGNITUDE:.*]] = arith.sitofp %[[M]] : i32 to f32
// CHECK-DAG:       %[[SMALL:.*]] = arith.mulf %[[MAGNITUDE]], %[[LEAST]] : f32
// CHECK-DAG:       %[[IS_SMALL:.*]] = arith.cmpi slt, %[[M]], %[[C8]] : i32
// CHECK:           %[[VALUE:.*]] = arith.select %[[IS_SMALL]], %[[SMALL]], %[[NORMAL]] : f32
// CHECK-DAG:       %[[NEGATIVE:.*]] = arith.negf %[[VALUE]] : f32
// CHECK-DAG:       %[[IS_POSITIVE:.*]] = arith.cmpi slt, %[[CODE]], %[[C128]] : i32
// CHECK:           arith.select %[[IS_POSITIVE]], %[[VALUE]], %[[NEGATIVE]] : f32
func.func @fp8(%x: tensor<?x40xf32>, %w: tensor<8x4x40xi8>, %o: tensor<9xi32>,
               %s: tensor<8x4x1xf32>, %y: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xf32>, tensor<8x4x40xi8>, tensor<9xi32>)
      scales(%s : tensor<8x4x1xf32>) outs(%y : tensor<?x4xf32>)
      {format = #moe.weight_format<fp8_e4m3>} -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}

// Rows are rounded in blocks of the group where that is less than 32: three of
// 40 features. The last block ends with feature 39; the inverse of a block of
// zeros is finite; ties are to even.

// CHECK-LABEL: func @rounded_rows
// CHECK-DAG:     %[[LEAST:.*]] = arith.constant -1.27{{0*}}e+02 : f32
// CHECK-DAG:     %[[MOST:.*]] = arith.constant 1.27{{0*}}e+02 : f32
// CHECK-DAG:     %[[FINITE:.*]] = arith.constant 3.40282347E+38 : f32
// CHECK-DAG:     %[[C16:.*]] = arith.constant 16 : index
// CHECK-DAG:     %[[C39:.*]] = arith.constant 39 : index
// CHECK:         %[[LARGEST:.*]] = linalg.generic {{.*}} ins(%{{.*}} : tensor<16xf32>) outs(%{{.*}} : tensor<?x3xf32>)
// CHECK:           arith.minsi %{{.*}}, %[[C39]] : index
// CHECK:           %[[ABS:.*]] = math.absf
// CHECK:           arith.maximumf %{{.*}}, %[[ABS]] : f32
// CHECK:         %[[ROUNDED:.*]] = linalg.generic {{.*}} ins(%{{.*}} : tensor<?x40xbf16>) outs(%{{.*}} : tensor<?x40xf32>)
// CHECK:           %[[X:.*]] = arith.extf
// CHECK:           %[[BLOCK:.*]] = arith.divui %{{.*}}, %[[C16]] : index
// CHECK:           %[[A:.*]] = tensor.extract %[[LARGEST]][%{{.*}}, %[[BLOCK]]]
// CHECK:           %[[ANY:.*]] = arith.divf %[[MOST]], %[[A]] : f32
// CHECK:           %[[INVERSE:.*]] = arith.minnumf %[[ANY]], %[[FINITE]] : f32
// CHECK:           %[[Q:.*]] = arith.mulf %[[X]], %[[INVERSE]] : f32
// CHECK:           %[[EVEN:.*]] = math.roundeven %[[Q]] : f32
// CHECK:           %[[UPPER:.*]] = arith.minnumf %[[EVEN]], %[[MOST]] : f32
// CHECK:           %[[INTEGER:.*]] = arith.maxnumf %[[UPPER]], %[[LEAST]] : f32
// CHECK:           %[[STEP:.*]] = arith.divf %[[A]], %[[MOST]] : f32
// CHECK:           arith.mulf %[[INTEGER]], %[[STEP]] : f32
// CHECK:         scf.forall
// CHECK:           tensor.extract_slice %[[ROUNDED]]
func.func @rounded_rows(%x: tensor<?x40xbf16>, %w: tensor<8x4x40xi8>, %o: tensor<9xi32>,
                        %rows: tensor<?xi32>, %s: tensor<8x4x3xf32>, %y: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xbf16>, tensor<8x4x40xi8>, tensor<9xi32>)
      rows(%rows : tensor<?xi32>) scales(%s : tensor<8x4x3xf32>) outs(%y : tensor<?x4xf32>)
      {format = #moe.weight_format<int8>, group = 16, activations = #moe.activation_format<int8>}
      -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}

// A block has 32 features at most, whatever the group is: two of 40.

// CHECK-LABEL: func @blocks_of_a_row
// CHECK:         linalg.generic {{.*}} ins(%{{.*}} : tensor<32xf32>) outs(%{{.*}} : tensor<?x2xf32>)
// CHECK:           arith.maximumf
func.func @blocks_of_a_row(%x: tensor<?x40xf32>, %w: tensor<8x4x20xi8>, %o: tensor<9xi32>,
                           %s: tensor<8x4x1xf32>, %y: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x40xf32>, tensor<8x4x20xi8>, tensor<9xi32>)
      scales(%s : tensor<8x4x1xf32>) outs(%y : tensor<?x4xf32>)
      {format = #moe.weight_format<int4>, activations = #moe.activation_format<int8>}
      -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}
