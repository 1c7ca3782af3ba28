"""Parsing, printing and passes through `_moe`."""

import pytest
from conftest import AFFINE

ROUTER = """module {
  func.func @route(%s: tensor<?x8xf32>, %g: tensor<?xKxf32>, %i: tensor<?xKxi32>)
      -> (tensor<?xKxf32>, tensor<?xKxi32>) {
    %r:2 = moe.topk_renorm ins(%s : tensor<?x8xf32>)
      outs(%g, %i : tensor<?xKxf32>, tensor<?xKxi32>) -> tensor<?xKxf32>, tensor<?xKxi32>
    return %r#0, %r#1 : tensor<?xKxf32>, tensor<?xKxi32>
  }
}
"""


def errors_of(moe, text, **options):
    with pytest.raises(moe.MoeError) as caught:
        moe.Module.parse(text, **options)
    assert isinstance(caught.value, ValueError)
    return caught.value.diagnostics


def test_text_round_trips(moe):
    text = moe.Module.parse(ROUTER.replace("K", "2")).text()
    assert "moe.topk_renorm" in text
    assert moe.Module.parse(text).text() == text


def test_debug_info_names_the_file(moe):
    module = moe.Module.parse(AFFINE, filename="router.mlir")
    assert "router.mlir" not in module.text()
    assert "router.mlir" in module.text(debug_info=True)


def test_bytecode_is_written_but_not_read(moe):
    bytecode = moe.Module.parse(AFFINE).bytecode()
    assert bytecode[:4] == b"ML\xefR"


def test_a_clone_is_independent(moe):
    module = moe.Module.parse(AFFINE)
    before = module.text()
    clone = module.clone()
    clone.run("symbol-privatize")
    assert "private" in clone.text()
    assert module.text() == before


@pytest.mark.parametrize("pipeline", ["cse", "builtin.module(cse)",
                                      " builtin.module(func.func(cse)) "])
def test_run_takes_pipelines_with_and_without_anchor(moe, pipeline):
    module = moe.Module.parse("""func.func @f(%x: i32) -> i32 {
      %a = arith.muli %x, %x : i32
      %b = arith.muli %x, %x : i32
      %c = arith.addi %a, %b : i32
      return %c : i32
    }""")
    module.run(pipeline)
    assert module.text().count("arith.muli") == 1


def test_an_unknown_pass_is_named(moe):
    with pytest.raises(moe.MoeError, match="'no-such-pass' does not refer to a registered pass"):
        moe.Module.parse(AFFINE).run("no-such-pass")


def test_a_diagnostic_has_file_line_and_source(moe):
    (message,) = errors_of(moe, ROUTER.replace("K", "9"), filename="router.mlir")
    assert message.startswith("router.mlir:4:")
    assert "expected k (9) to be at most e (8)" in message
    assert "%r:2 = moe.topk_renorm" in message


@pytest.mark.parametrize("text, expected", [
    ("func.func @f(", "x.mlir:1:"),
    ("module {" * 300, "expected at most 256 levels of brackets"),
    ("[" * 200_000, "expected at most 256 levels of brackets"),
    ("func.func private @f(tuple<" + "tuple<" * 300, "expected at most 256 levels"),
    ("func.func @f(%a: memref<9223372036854775807x3xi32>) { return }", "at most 2^62 bytes"),
    ("func.func @f() { %0 = tensor.empty() : tensor<4611686018427387904x2xf32> return }",
     "at most 2^62 bytes"),
    ("ML\u00efR", "x.mlir:1:3: error: unexpected character"),
    ("func.func @f() \0 {}", "found a NUL byte"),
    ('"unknown.op"() : () -> ()', "unregistered"),
])
def test_broken_text_is_an_error_not_a_crash(moe, text, expected):
    assert expected in errors_of(moe, text, filename="x.mlir")[0]


def test_brackets_in_strings_and_comments_do_not_count(moe):
    text = "// " + "{" * 500 + '\nmodule attributes {moe.note = "' + "(" * 500 + '\\"("} {}'
    assert "(((" in moe.Module.parse(text).text()


def test_arrows_and_comparisons_do_not_count(moe):
    text = "".join(f"func.func private @f{i}() -> i32\n" for i in range(400))
    text += "func.func private @g() attributes {s = affine_set<(d0) : (d0 >= 0)>}\n"
    assert "@f399" in moe.Module.parse(text).text()


def test_random_edits_never_crash(moe):
    import random

    source = ROUTER.replace("K", "2") + AFFINE
    rng = random.Random(7)
    for _ in range(300):
        text = list(source)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            kind = rng.randrange(3)
            if kind == 0:
                del text[at : at + rng.randint(1, 20)]
            elif kind == 1:
                text.insert(at, rng.choice("%@#!<>[](){}:,x0123456789\"-?") * rng.randint(1, 3))
            else:
                text[at] = chr(rng.randrange(1, 127))
        try:
            moe.Module.parse("".join(text)).text()
        except moe.MoeError as error:
            assert error.diagnostics
