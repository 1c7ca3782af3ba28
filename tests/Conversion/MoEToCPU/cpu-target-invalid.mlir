// RUN: not %moe-opt %s --convert-moe-to-cpu="vector-width=12" 2>&1 | FileCheck %s --check-prefix=WIDTH
// RUN: not %moe-opt %s --convert-moe-to-cpu="vector-width=8 bf16-dot" 2>&1 | FileCheck %s --check-prefix=DOT
// RUN: not %moe-opt %s --convert-moe-to-cpu="bf16-tiles" 2>&1 | FileCheck %s --check-prefix=TILES
// RUN: not %moe-opt %s --convert-moe-to-cpu="vector-width=4 int8-dot" 2>&1 | FileCheck %s --check-prefix=BYTES
// RUN: not %moe-opt %s --convert-moe-to-cpu="vector-width=4 byte-pairs" 2>&1 | FileCheck %s --check-prefix=PAIRS
// RUN: not %moe-opt %s --convert-moe-to-cpu="vector-width=8 byte-table" 2>&1 | FileCheck %s --check-prefix=TABLE
// RUN: not %moe-opt %s --convert-moe-to-cpu="product-vectors=3" 2>&1 | FileCheck %s --check-prefix=ODD
// RUN: not %moe-opt %s --convert-moe-to-cpu="product-rows=7" 2>&1 | FileCheck %s --check-prefix=ROWS
// RUN: not %moe-opt %s --convert-moe-to-cpu="product-panels=65" 2>&1 | FileCheck %s --check-prefix=PANELS
// RUN: not %moe-opt %s --convert-moe-to-cpu="mix-queries=100" 2>&1 | FileCheck %s --check-prefix=QUERIES
// RUN: not %moe-opt %s --convert-moe-to-cpu="expert-rows=-1" 2>&1 | FileCheck %s --check-prefix=EXPERTS

// WIDTH: error: expected 'vector-width' to be a power of two of at least 4, found 12
// DOT: error: expected 'vector-width' to be 16 with 'bf16-dot', found 8
// TILES: error: expected 'bf16-dot' to be true with 'bf16-tiles', found 0
// BYTES: error: expected 'vector-width' to be 8 or 16 with 'int8-dot', found 4
// PAIRS: error: expected 'vector-width' to be 8 or 16 with 'byte-pairs', found 4
// TABLE: error: expected 'vector-width' to be 16 with 'byte-table', found 8
// ODD: error: expected 'product-vectors' to be even, found 3
// ROWS: error: expected 'product-rows' (7) by 'product-vectors' (4) to take at most 32 registers with one k of both, found 33
// PANELS: error: expected 'product-panels' to be 0 to 64, found 65
// QUERIES: error: expected 'mix-queries' to be a multiple of the 6 rows of a tile, 0 to 1024, found 100
// EXPERTS: error: expected 'expert-rows' to be 0 to 1024, found -1
func.func @f() {
  return
}
