//===- Syntax.h - PTX text as a tree ----------------------------*- C++ -*-===//
//
// What the parser produces and the decoder reads. Nothing here knows what an
// instruction means.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_SYNTAX_H
#define MOE_LIB_SIMULATOR_SYNTAX_H

#include "Types.h"

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace moe::sim {

/// One operand as written.
///
///   %r1  foo+8     Name, with `offset`
///   !%p1           Name, `negated`
///   12  -1  0x7f   Integer, in `bits`
///   0f3f800000     Float32, in `bits`;  0d...: Float64
///   1.5            Decimal, a double in `bits`
///   {a, b}         Vector, in `parts`
///   (a, b)         List, in `parts`
///   a|b            Pair, in `parts`
///   [a+4, {x, y}]  Address: parts[0] is the base, the rest follows
///   _              Sink
struct Operand {
  enum class Kind : u8 {
    Name,
    Integer,
    Float32,
    Float64,
    Decimal,
    Vector,
    List,
    Pair,
    Address,
    Sink,
  };
  Kind kind = Kind::Sink;
  bool negated = false;
  std::string name;
  u64 bits = 0;
  i64 offset = 0;
  std::vector<Operand> parts;

  bool is(Kind k) const { return kind == k; }
};

/// `.loc`: a line of the source that the PTX was compiled from.
struct SourceLine {
  u32 file = 0;
  u32 line = 0;
};

/// As many as the text has. One that is missing throws std::out_of_range, which
/// becomes a problem of the kernel (Program.cpp).
struct Operands : std::vector<Operand> {
  const Operand &operator[](size_t index) const { return at(index); }
};

struct Instruction {
  /// The opcode split at its dots: "ld", "global", "v4", "f32".
  std::vector<std::string> words;
  Operands operands;
  std::string guard;
  bool guardNegated = false;
  u32 line = 0;
  SourceLine source;

  bool has(std::string_view word) const;
  std::string opcode() const;
};

/// One value of an initialiser: a number, or the address of a variable.
struct Initializer {
  u64 bits = 0;
  std::string symbol;
  bool generic = false;
};

struct Variable {
  std::string name;
  std::string type = "b8";
  Space space = Space::Global;
  u32 elementBytes = 1;
  u32 alignment = 1;
  u64 count = 1;
  bool isArray = false;
  /// `.extern .shared x[]`: the dynamic shared memory of a launch.
  bool isUnsized = false;
  bool isExternal = false;
  std::vector<Initializer> initializers;

  u64 bytes() const { return count * elementBytes; }
};

/// `.reg .b32 %r<7>, %x;` gives {"%r", 7} and {"%x", -1}.
struct RegisterDeclaration {
  std::string type;
  std::vector<std::pair<std::string, i64>> names;
};

struct Statement {
  enum class Kind : u8 {
    Instruction,
    Label,
    OpenScope,
    CloseScope,
    Registers,
    Variable,
    BranchTargets,
  };
  Kind kind;
  u32 line = 0;
  Instruction instruction;
  /// Label and BranchTargets.
  std::string label;
  std::vector<std::string> targets;
  RegisterDeclaration registers;
  Variable variable;
};

struct Function {
  std::string name;
  bool isKernel = false;
  bool hasBody = false;
  u32 line = 0;
  std::vector<Variable> results;
  std::vector<Variable> params;
  std::vector<Statement> body;
  /// Launch bounds that the launch has to respect; 0 where not given.
  u32 maxThreads = 0;
  u32 requiredBlock[3] = {0, 0, 0};
  u32 requiredCluster[3] = {0, 0, 0};
  u32 maxClusterRank = 0;
  u32 maxRegisters = 0;
  /// That an SM must have room for.
  u32 minBlocks = 0;
};

struct SyntaxTree {
  std::string version;
  std::string target;
  std::map<u32, std::string> files;
  std::vector<Variable> variables;
  std::map<std::string, Function> functions;
};

/// Bytes of one element of a PTX type such as "f32" or "bf16x2"; 0 for "pred"
/// and for words that are not types.
u32 typeBytes(std::string_view type);

/// Parses PTX text. Throws std::invalid_argument that names the line.
SyntaxTree parsePtx(std::string_view text);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_SYNTAX_H
