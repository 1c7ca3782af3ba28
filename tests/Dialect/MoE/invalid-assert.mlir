// RUN: %moe-opt %s --split-input-file --verify-diagnostics

func.func @a_place_without_a_value(%inside: i1, %row: i64) {
  // expected-error @below {{expected the message to have places for 1 values, found {1}}}
  moe.assert <index> %inside, "row {0} of {1}" (%row : i64)
  return
}

// -----

func.func @more_values_than_places_have_digits(%inside: i1, %i: index) {
  // expected-error @below {{expected at most 8 values, found 9}}
  moe.assert <index> %inside, "" (%i, %i, %i, %i, %i, %i, %i, %i, %i
    : index, index, index, index, index, index, index, index, index)
  return
}

// -----

func.func @a_wide_value(%inside: i1, %i: i128) {
  // expected-error @below {{expected values of at most 64 bits, found 'i128'}}
  moe.assert <index> %inside, "{0}" (%i : i128)
  return
}
