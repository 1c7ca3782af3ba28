"""Valid modules of moe ops, drawn at random, and edits of modules.

An op is described by its clauses. A clause is a word and its operands; an
operand is `name:dtype:dims`, where each letter of `dims` is a size that has one
value in a module, so that results fit the operands of later ops. `?` after a
word: the clause may be left out. An attribute is `name=kind`; what follows `/`
in a kind tells apart the ops that take different values of it.

    dtypes: A one of f32, bf16, f16; S f32; I an index of an expert, i32 or i64; M i1
    dims:   N leading sizes and tokens, n tokens, e experts, k chosen, d features, ...
"""

import random
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_MIX = "key_bias?=%kb:S:bhm; bias?=%bias:A:bhnm; query_mask?=%qm:M:bn; key_mask?=%km:M:bm"
_ATTENTION = ("scale=f", "visibility=visibility", "precision=precision")

# mnemonic -> (clauses, results, attributes)
OPS = {
    "router_logits": ("ins=%h:A:Nd,%w:A:ed; bias?=%b:A:e", "z:S:Ne", ()),
    "cosine_logits": ("ins=%h:A:Nd,%w:A:ed; tau?=%tau:f32:", "z:S:Ne",
                      ("tau=f", "eps=f", "norm_token=b", "norm_emb=b")),
    "ac_logits": ("ins=%h:A:Nd,%m:S:ed,%i:I:Nk,%w:A:ed; gates?=%g:S:Nk; bias?=%b:A:e", "z:S:Ne",
                  ()),
    "topk_renorm": ("ins=%z:A:Ne; bias?=%b:A:e; mask?=%mask:M:N; num_valid?=%v:i32:",
                    "g:S:Nk,i:I:Nk",
                    ("score=score_function", "kind=score_kind", "renorm=b", "eps=f",
                     "route_scale=f")),
    "threshold_renorm": ("ins=%p:S:Ne; theta?=%t:f32:; mask?=%mask:M:N", "p:S:Ne,c:I32:N",
                         ("renorm=b", "theta=f")),
    "densify": ("ins=%g:S:Nk,%i:I:Nk", "d:S:Ne", ()),
    "make_finite": ("ins=%z:A:Ne", "z:S:Ne", ("scope=finite_scope",)),
    "dispatch": ("ins=%i:I:nk; priority?=%p:S:n; mask?=%mask:M:n", "s:=i:nk,o:I32:f,c:I32:e",
                 ("alignment=i", "capacity_factor=f", "drop=drop")),
    "combine": ("ins=%x:A:sd,%g:S:Nk,%s:I:Nk; shared?=%sh:A:Nd", "y:A:Nd", ()),
    "token_rows": ("ins=%i:I:nk", "r:I:s", ()),
    "grouped_linear": ("ins=%x:A:nd,%w:A:erd,%o:I:f; rows=%rows:I:s; bias?=%b:A:er", "y:A:sr",
                       ("activation=activation",)),
    "grouped_outer": ("ins=%dy:A:sr,%x:A:nd,%o:I:f; rows=%rows:I:s", "w:A:erd", ()),
    "balance_loss": ("ins=%p:S:ne,%i:I:nk; mask?=%mask:M:n", "l:S:,load:I32:e",
                     ("divisor=loss_divisor",)),
    "z_loss": ("ins=%z:A:ne; mask?=%mask:M:n", "l:S:,lse:S:n", ()),
    "bias_update": ("ins=%b:S:e,%load:I32:e", "b:S:e", ("gamma=f",)),
    "similarity_inform": ("ins=%u:A:bnd,%x:A:bne; mask?=%km:M:bn; query_mask?=%qm:M:bn;"
                          " tau?=%tau:f32:", "p:S:bne,lse:S:bn",
                          ("visibility=visibility/similarity", "tau=f",
                           "restrict=restrict", "precision=precision")),
    "similarity_inform_backward": (
        "ins=%u:A:bnd,%x:A:bne,%p:S:bne,%lse:S:bn,%dp:S:bne; dlse?=%dl:S:bn",
        "du:S:bnd,de:S:bne",
        ("visibility=visibility/similarity", "tau=f", "restrict=restrict")),
    "attention_posterior": (
        "ins=%q:A:bhnr,%k:A:bhnr,%u:A:bnd,%x:A:bne; means=%vp:A:bhnd; bias?=%bias:A:bhnn;"
        " query_mask?=%qm:M:bn; key_mask?=%km:M:bn; sigma?=%t:f32:",
        "p:S:bne,head:I32:b,l1:S:b1n,l2:S:b1n",
        (*_ATTENTION, "sigma=f", "head_scope=head_scope")),
    "attention_entropy": ("ins=%q:A:bhnr,%k:A:bhmr; bias?=%bias:A:bhnm;"
                          " query_mask?=%qm:M:bn; key_mask?=%km:M:bm",
                          "m:S:bh,rows:S:bhn", _ATTENTION),
    "softmax_mix": (f"ins=%q:A:bhnr,%k:A:bhmr; values=%v:A:bmd; {_MIX}", "x:S:bhnd,lse:S:bhn",
                    _ATTENTION),
    "softmax_mix_self": ("ins=%q:A:b1nr,%v:A:bnd; mask?=%km:M:bn", "x:S:b1nd,lse:S:b1n",
                         ("scale=f", "visibility=visibility/self")),
    "softmax_mix_backward_dq": (
        f"ins=%q:A:bhnr,%k:A:bhmr,%l:S:bhn,%dl:S:bhn; values=%v:A:bmd,%dx:S:bhnd; {_MIX}",
        "dq:S:bhnr", _ATTENTION),
    "softmax_mix_backward_dkv": (
        f"ins=%q:A:bhnr,%k:A:bhmr,%l:S:bhn,%dl:S:bhn; values=%v:A:bmd,%dx:S:bhnd; {_MIX}",
        "dk:S:bhmr,dv:S:bhmd", _ATTENTION),
    "softmax_mix_backward_self": (
        "ins=%q:A:b1nr,%l:S:b1n,%dl:S:b1n,%v:A:bnd,%dx:S:b1nd; mask?=%km:M:bn",
        "dq:S:b1nr,dv:S:b1nd", ("scale=f", "visibility=visibility")),
    "topk_renorm_backward": ("ins=%dg:S:Nk,%g:S:Nk,%i:I:Nk", "dz:S:Ne",
                             ("renorm=b", "eps=f", "route_scale=f")),
    "mad_dispersion": ("ins=%h:A:nd,%a:I:n; mask?=%mask:M:n", "s:S:ed,m:S:ed,c:I32:e",
                       ("measure=dispersion_measure",)),
    "dispersion_weights": ("ins=%s:S:ed,%c:I32:e", "m:S:ed",
                           ("scale=dispersion_scale", "eps=f", "clamp=f", "include_empty=b")),
    "adjacency_gate": ("ins=%p:S:Ne,%a:S:ee", "g:S:Ne", ("threshold=f", "cold_start=cold_start")),
    "adjacency_update": ("ins=%a:S:ee,%i:I:nk; mask?=%mask:M:n", "a:S:ee",
                         ("beta=f", "norm=adjacency_norm", "diagonal=b")),
    "co_selections": ("ins=%i:I:nk; mask?=%mask:M:n", "c:I32:ee", ()),
}


def _read_enums() -> dict[str, list[str]]:
    """Mnemonic -> values, of the dialect's enums."""
    text = (ROOT / "include/MoE/Dialect/MoE/IR/MoEAttrs.td").read_text()
    cases = {enum: re.findall(r'I32EnumAttrCase<"\w+", \d+, "(\w+)">', body)
             for enum, body in re.findall(r"def (\w+) : MoE_I32Enum<(.*?)\]>;", text, re.S)}
    return {mnemonic: cases[enum]
            for enum, mnemonic in re.findall(r'MoE_EnumAttr<(\w+), "(\w+)">', text)}


ENUMS = {
    **_read_enums(),
    "visibility": ["causal", "window=1", "exclude_self", "causal,window=3,exclude_self",
                   "causal,window=16"],
    "visibility/similarity": ["causal", "window=1", "window=16", "causal,window=3"],
    "visibility/self": ["exclude_self", "window=2", "window=16,exclude_self"],
}

# A size, and how often it is known only at run time.
_SIZES = {"n": ((1, 2, 5, 7, 16, 33), 0.6), "m": ((1, 3, 8, 17), 0.4), "e": ((2, 4, 8, 16, 65), 0.1),
          "d": ((1, 3, 8, 24, 64), 0.1), "r": ((1, 4, 8, 16), 0.1), "b": ((1, 2), 0.2),
          "h": ((1, 2, 4), 0.1), "k": ((1, 2), 0.0), "s": ((4, 32), 0.5)}


class _Module:
    """One function, built op by op."""

    def __init__(self, draw):
        self.draw = draw
        self.sizes = {letter: "?" if draw.random() < dynamic else str(draw.choice(sizes))
                      for letter, (sizes, dynamic) in _SIZES.items()}
        self.sizes["f"] = str(int(self.sizes["e"]) + 1) if self.sizes["e"] != "?" else "?"
        self.sizes["1"] = "1"
        self.leading = draw.choice(["", "", "2x", "?x"])
        self.index = draw.choice(["i32", "i64"])
        self.arguments, self.lines, self.values, self.results = [], [], {}, []

    def type_of(self, dtype, dims):
        element = {"S": "f32", "M": "i1", "I": self.index, "I32": "i32",
                   "A": self.draw.choice(["f32", "f32", "bf16", "f16"])}.get(dtype, dtype)
        if not dims and dtype in ("f32", "i32"):
            return element  # a scalar
        shape = "".join(self.leading + self.sizes["n"] + "x" if d == "N" else self.sizes[d] + "x"
                        for d in dims)
        return f"tensor<{shape}{element}>"

    def value(self, type_):
        """A result that fits, or an argument of the function."""
        known = self.values.get(type_, [])
        if known and self.draw.random() < 0.7:
            return self.draw.choice(known)
        name = f"%a{len(self.arguments)}"
        self.arguments.append(f"{name}: {type_}")
        return name

    def attributes(self, attributes):
        chosen = [self.attribute(a) for a in attributes if self.draw.random() < 0.3]
        return "{" + ", ".join(chosen) + "}" if chosen else ""

    def attribute(self, described):
        name, kind = described.split("=")
        value = {"f": lambda: self.draw.choice(["0.5", "1.0", "2.0", "0.0078125"]) + " : f64",
                 "i": lambda: f"{self.draw.choice([1, 2, 3, 16])} : i64",
                 "b": lambda: self.draw.choice(["true", "false"])}
        if kind in value:
            return f"{name} = {value[kind]()}"
        mnemonic = kind.partition("/")[0]
        return f"{name} = #moe.{mnemonic}<{self.draw.choice(ENUMS[kind])}>"

    def add(self, mnemonic):
        clauses, results, attributes = OPS[mnemonic]
        text, types = [], {}
        for clause in clauses.split(";"):
            word, operands = clause.strip().split("=", 1)
            if word.endswith("?") and self.draw.random() < 0.7:
                continue
            listed = [operand.split(":") for operand in operands.split(",")]
            for name, dtype, dims in listed:
                types[name] = self.type_of(dtype, dims)
            names = ", ".join(self.value(types[name]) for name, _, _ in listed)
            listed_types = ", ".join(types[name] for name, _, _ in listed)
            text.append(f"{word.rstrip('?')}({names} : {listed_types})")
        outs = [types["%" + dtype[1:]] if dtype.startswith("=") else self.type_of(dtype, dims)
                for _, dtype, dims in (result.split(":") for result in results.split(","))]
        inits = []
        for type_ in outs:
            inits.append(f"%a{len(self.arguments)}")
            self.arguments.append(f"{inits[-1]}: {type_}")
        name = f"%r{len(self.lines)}"
        self.lines.append(
            f"  {name}:{len(outs)} = moe.{mnemonic} {' '.join(text)} outs({', '.join(inits)} : "
            f"{', '.join(outs)}) {self.attributes(attributes)} -> {', '.join(outs)}")
        for i, type_ in enumerate(outs):
            self.values.setdefault(type_, []).append(f"{name}#{i}")
            self.results.append((f"{name}#{i}", type_))

    def text(self):
        names = ", ".join(name for name, _ in self.results)
        types = ", ".join(type_ for _, type_ in self.results)
        return (f"func.func @f({', '.join(self.arguments)}) -> ({types}) {{\n"
                + "\n".join(self.lines) + f"\n  return {names} : {types}\n}}\n")


def draw_module(draw: random.Random) -> str:
    """A function of one to four ops that feed each other."""
    module = _Module(draw)
    for _ in range(draw.choice([1, 1, 2, 3, 4])):
        module.add(draw.choice(list(OPS)))
    return module.text()


_TOKEN = re.compile(r"tensor<[^>]*>|memref<[^>]*>|#moe\.\w+<[^>]*>|%\w+(?:#\d+)?|-?\b\d+(?:\.\d+)?\b"
                    r"|\b[fib]f?\d+\b|\b[a-z_]\w*(?:\.\w+)*\b|\S")
_EDGES = ["0", "-1", "1", "2", "7", "1024", "4294967296", "9223372036854775807",
          "-9223372036854775808", "0.0", "-1.0", "1e308", "0x7FF0000000000000"]


def _kind(token):
    if token[0] in "%#":
        return token[0]
    if token.startswith(("tensor<", "memref<")):
        return "type"
    if token[0].isdigit() or token[0] == "-":
        return "number"
    return "word" if token[0].isalpha() else "sign"


def edit(text: str, draw: random.Random) -> str:
    """One to four edits: another operand, type, number, attribute; a size; a line."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        text = draw.choice([_edit_token, _edit_token, _edit_token, _edit_size, _edit_line,
                            _edit_attribute])(text, draw)
    return text


def _edit_token(text, draw):
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return text
    token = draw.choice(tokens)
    kind = _kind(token[0])
    others = [t[0] for t in tokens if _kind(t[0]) == kind]
    new = draw.choice(others)
    if kind == "number" and draw.random() < 0.5:
        new = draw.choice(_EDGES)
    if kind == "#" and "<" in token[0]:
        family = token[0][5:token[0].index("<")]
        new = f"#moe.{family}<{draw.choice(ENUMS.get(family, ['all']))}>"
    if draw.random() < 0.1:
        new = draw.choice(["", new + " " + new, token[0] + ", " + new])
    return text[:token.start()] + new + text[token.end():]


def _edit_size(text, draw):
    """Another extent in every type that has this one, or in one type."""
    extents = re.findall(r"(?<=[<x])(?:\d+|\?)(?=x)", text)
    if not extents:
        return text
    old = re.escape(draw.choice(extents))
    new = draw.choice(["?", "0", "1", "2", "3", "33", "64", "100", "1000", "4096"])
    return re.sub(rf"(?<=[<x]){old}(?=x)", new, text, count=draw.choice([0, 0, 1]))


def _edit_line(text, draw):
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    match draw.randrange(3):
        case 0:
            del lines[at]
        case 1:
            lines.insert(draw.randrange(len(lines)), lines[at])
        case _:
            other = draw.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
    return "\n".join(lines)


def _edit_attribute(text, draw):
    """An attribute of any op, added to one."""
    names = [a for _, _, attributes in OPS.values() for a in attributes]
    maker = _Module(draw)
    attribute = maker.attribute(draw.choice(names))
    if draw.random() < 0.3:
        attribute = re.sub(r"= [-\d.]+", "= " + draw.choice(_EDGES), attribute)
    places = [m.end() for m in re.finditer(r"\{(?=\w+ =)", text)]
    if places and draw.random() < 0.7:
        at = draw.choice(places)
        return text[:at] + attribute + ", " + text[at:]
    arrows = [m.start() for m in re.finditer(r"(?<!\)) ->|\n", text)]
    at = draw.choice(arrows) if arrows else 0
    return text[:at] + " {" + attribute + "}" + text[at:]
