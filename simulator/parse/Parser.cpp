//===- Parser.cpp - PTX text to a syntax tree -----------------------------===//
//
// Parses what LLVM and nvcc emit. Directives for debuggers and for ptxas's
// heuristics are skipped; everything that changes meaning is kept.
//
//===----------------------------------------------------------------------===//

#include "Syntax.h"
#include "TokenStream.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <stdexcept>

namespace moe::sim {

namespace {

class Parser : TokenStream {
public:
  explicit Parser(std::string_view text) : TokenStream(text) {}

  SyntaxTree run() {
    while (peek().kind != TokenKind::End)
      parseModuleItem();
    return std::move(tree);
  }

private:
  //===--- Module level ---------------------------------------------------===//

  void parseModuleItem() {
    const Token &token = peek();
    if (token.is(';')) {
      take();
      return;
    }
    if (token.kind != TokenKind::Dot)
      fail("a directive");
    if (token.isDot("version")) {
      take();
      tree.version = std::string(take().text);
    } else if (token.isDot("target")) {
      take();
      tree.target = takeName("a target");
      skipRestOfTarget();
    } else if (token.isDot("address_size")) {
      take();
      if (takeInteger() != 64)
        fail("address_size 64: the simulator runs 64-bit PTX only");
    } else if (token.isDot("file")) {
      parseFile();
    } else if (token.isDot("section")) {
      while (peek().kind != TokenKind::End && !peek().is('{'))
        take();
      skipBraces();
    } else if (token.isDot("pragma") || token.isDot("alias")) {
      skipTo(';');
    } else {
      parseLinkedItem();
    }
  }

  void skipRestOfTarget() {
    while (takeIf(','))
      take();
  }

  void parseFile() {
    u32 line = take().line;
    u32 index = static_cast<u32>(takeInteger());
    if (peek().kind == TokenKind::String && peek().line == line) {
      std::string_view text = take().text;
      tree.files[index] = std::string(text.substr(1, text.size() - 2));
    }
    while (peek().line == line && peek().kind != TokenKind::End)
      take();
  }

  void parseLinkedItem() {
    bool isExternal = false;
    while (peek().isDot("visible") || peek().isDot("extern") ||
           peek().isDot("weak") || peek().isDot("common")) {
      isExternal |= peek().isDot("extern");
      take();
    }
    if (peek().isDot("entry") || peek().isDot("func")) {
      parseFunction();
      return;
    }
    for (Variable &variable : parseVariables()) {
      variable.isExternal = isExternal;
      tree.variables.push_back(std::move(variable));
    }
  }

  void parseFunction() {
    Function function;
    function.line = peek().line;
    function.isKernel = take().isDot("entry");
    if (peek().isDot("attribute")) {
      take();
      skipTo(')');
    }
    if (peek().is('('))
      function.results = parseParams();
    function.name = takeName("a function name");
    if (peek().is('('))
      function.params = parseParams();
    parseFunctionDirectives(function);
    if (!takeIf(';')) {
      function.hasBody = true;
      parseBody(function.body);
    }
    Function &slot = tree.functions[function.name];
    if (!slot.hasBody)
      slot = std::move(function);
  }

  std::vector<Variable> parseParams() {
    std::vector<Variable> params;
    expect('(');
    while (!takeIf(')')) {
      if (peek().kind == TokenKind::End)
        fail("')'");
      params.push_back(parseVariable());
      takeIf(',');
    }
    return params;
  }

  void parseFunctionDirectives(Function &function) {
    while (peek().kind == TokenKind::Dot) {
      const Token &directive = take();
      u32 extents[3] = {1, 1, 1};
      for (u32 i = 0; peek().kind == TokenKind::Number && i < 3; ++i) {
        extents[i] = static_cast<u32>(takeInteger());
        if (!takeIf(','))
          break;
      }
      if (directive.isDot("maxntid"))
        function.maxThreads = extents[0] * extents[1] * extents[2];
      else if (directive.isDot("maxnreg"))
        function.maxRegisters = extents[0];
      else if (directive.isDot("minnctapersm"))
        function.minBlocks = extents[0];
      else if (directive.isDot("maxclusterrank"))
        function.maxClusterRank = extents[0];
      else if (directive.isDot("reqntid"))
        std::copy(extents, extents + 3, function.requiredBlock);
      else if (directive.isDot("reqnctapercluster"))
        std::copy(extents, extents + 3, function.requiredCluster);
      if (directive.isDot("pragma"))
        skipTo(';');
    }
  }

  //===--- Variables ------------------------------------------------------===//

  static bool parseSpace(const Token &token, Space &space) {
    static constexpr std::pair<std::string_view, Space> spaces[] = {
        {"global", Space::Global}, {"shared", Space::Shared},
        {"local", Space::Local},   {"param", Space::Param},
        {"const", Space::Const},   {"shared::cta", Space::Shared},
        {"reg", Space::Generic}};
    for (auto [name, value] : spaces)
      if (token.isDot(name)) {
        space = value;
        return true;
      }
    return false;
  }

  /// `.shared .align 4 .b8 name[16] = {...}`, without the semicolon.
  Variable parseVariable() {
    Variable variable;
    if (!parseSpace(peek(), variable.space))
      fail("a state space");
    take();
    parseVariableHeader(variable);
    parseDeclarator(variable);
    return variable;
  }

  std::vector<Variable> parseVariables() {
    Variable header;
    if (!parseSpace(peek(), header.space))
      fail("a state space");
    take();
    parseVariableHeader(header);
    std::vector<Variable> variables;
    do {
      Variable variable = header;
      parseDeclarator(variable);
      variables.push_back(std::move(variable));
    } while (takeIf(','));
    expect(';');
    return variables;
  }

  void parseVariableHeader(Variable &variable) {
    u32 lanes = 1;
    bool isPointer = false;
    while (peek().kind == TokenKind::Dot) {
      const Token &word = take();
      Space pointee;
      if (word.isDot("align")) {
        u64 alignment = takeInteger();
        if (!std::has_single_bit(alignment) || alignment > kMaxAlignment)
          fail("an alignment that is a power of two, at most " +
               std::to_string(kMaxAlignment) + ", before this");
        // In `.ptr .global .align 16` it is the pointee's.
        if (!isPointer)
          variable.alignment = static_cast<u32>(alignment);
      } else if (word.isDot("v2") || word.isDot("v4")) {
        lanes = word.text[2] - '0';
      } else if (word.isDot("ptr")) {
        isPointer = true;
      } else if (word.isDot("attribute")) {
        skipTo(')');
      } else if (word.isDot("pred")) {
        variable.type = "pred";
        variable.elementBytes = 1;
      } else if (u32 bytes = typeBytes(word.text.substr(1))) {
        variable.type = std::string(word.text.substr(1));
        variable.elementBytes = bytes;
      } else if (!(isPointer && parseSpace(word, pointee))) {
        --pos;
        fail("a variable's type");
      }
    }
    variable.elementBytes *= lanes;
    variable.alignment = std::max(variable.alignment, variable.elementBytes);
  }

  void parseDeclarator(Variable &variable) {
    variable.name = takeName("a variable name");
    while (takeIf('[')) {
      variable.isArray = true;
      if (takeIf(']')) {
        variable.isUnsized = true;
        variable.count = 0;
        continue;
      }
      u64 count = takeInteger();
      if (count && variable.count > kMaxElements / count)
        fail("a variable of at most " + std::to_string(kMaxElements) +
             " elements before this");
      variable.count *= count;
      expect(']');
    }
    if (takeIf('=')) {
      parseInitializer(variable);
      if (variable.isUnsized) {
        variable.count = variable.initializers.size();
        variable.isUnsized = false;
      }
    }
  }

  void parseInitializer(Variable &variable) {
    if (takeIf('{')) {
      Nesting nesting(*this);
      while (!takeIf('}')) {
        parseInitializer(variable);
        if (!takeIf(',') && !peek().is('}'))
          fail("',' or '}'");
      }
      return;
    }
    Initializer value;
    if (peek().kind == TokenKind::Name) {
      value.symbol = std::string(take().text);
      if (value.symbol == "generic") {
        value.generic = true;
        expect('(');
        value.symbol = takeName("a variable");
        expect(')');
      }
      if (takeIf('+'))
        value.bits = takeInteger();
    } else {
      Operand operand = parseNumber();
      value.bits = operand.bits;
    }
    variable.initializers.push_back(std::move(value));
  }

  //===--- Function bodies ------------------------------------------------===//

  void parseBody(std::vector<Statement> &body) {
    expect('{');
    source = {};
    for (int depth = 1; depth > 0;) {
      const Token &token = peek();
      if (token.kind == TokenKind::End)
        fail("'}'");
      Statement statement;
      statement.line = token.line;
      if (token.is('{') || token.is('}')) {
        depth += token.is('{') ? 1 : -1;
        statement.kind = token.is('{') ? Statement::Kind::OpenScope
                                       : Statement::Kind::CloseScope;
        take();
        if (depth > 0)
          body.push_back(std::move(statement));
      } else if (token.is(';')) {
        take();
      } else if (token.kind == TokenKind::Dot) {
        parseBodyDirective(body, statement);
      } else if (token.kind == TokenKind::Name && peek(1).is(':')) {
        statement.kind = Statement::Kind::Label;
        statement.label = std::string(take().text);
        take();
        if (peek().isDot("branchtargets"))
          parseBranchTargets(statement);
        else if (peek().isDot("callprototype") || peek().isDot("calltargets"))
          skipTo(';');
        body.push_back(std::move(statement));
      } else {
        statement.kind = Statement::Kind::Instruction;
        parseInstruction(statement.instruction);
        body.push_back(std::move(statement));
      }
    }
  }

  void parseBranchTargets(Statement &statement) {
    statement.kind = Statement::Kind::BranchTargets;
    take();
    do
      statement.targets.push_back(takeName("a label"));
    while (takeIf(','));
    expect(';');
  }

  void parseBodyDirective(std::vector<Statement> &body, Statement &statement) {
    const Token &token = peek();
    if (token.isDot("loc")) {
      u32 line = take().line;
      source.file = static_cast<u32>(takeInteger());
      source.line = static_cast<u32>(takeInteger());
      while (peek().kind != TokenKind::End && peek().line == line)
        take();
    } else if (token.isDot("file")) {
      skipLine();
    } else if (token.isDot("pragma")) {
      skipTo(';');
    } else if (token.isDot("reg")) {
      take();
      statement.kind = Statement::Kind::Registers;
      parseRegisters(statement.registers);
      body.push_back(std::move(statement));
    } else {
      statement.kind = Statement::Kind::Variable;
      for (Variable &variable : parseVariables()) {
        statement.variable = std::move(variable);
        body.push_back(statement);
      }
    }
  }

  void parseRegisters(RegisterDeclaration &declaration) {
    if (peek().kind != TokenKind::Dot)
      fail("a register type");
    declaration.type = std::string(take().text.substr(1));
    if (declaration.type != "pred" && typeBytes(declaration.type) == 0) {
      --pos;
      fail("a scalar register type");
    }
    do {
      std::string name = takeName("a register name");
      i64 count = -1;
      if (takeIf('<')) {
        count = static_cast<i64>(takeInteger());
        expect('>');
      }
      declaration.names.emplace_back(std::move(name), count);
    } while (takeIf(','));
    expect(';');
  }

  void parseInstruction(Instruction &instruction) {
    instruction.line = peek().line;
    instruction.source = source;
    if (takeIf('@')) {
      instruction.guardNegated = takeIf('!');
      instruction.guard = takeName("a predicate");
    }
    instruction.words.push_back(takeName("an instruction"));
    while (peek().kind == TokenKind::Dot)
      instruction.words.push_back(std::string(take().text.substr(1)));
    while (!takeIf(';')) {
      instruction.operands.push_back(parseOperand());
      if (!takeIf(',') && !peek().is(';'))
        fail("',' or ';'");
    }
  }

  Operand parseOperand() {
    Operand operand = parseSimpleOperand();
    if (!peek().is('|'))
      return operand;
    take();
    Operand pair;
    pair.kind = Operand::Kind::Pair;
    pair.parts.push_back(std::move(operand));
    pair.parts.push_back(parseSimpleOperand());
    return pair;
  }

  Operand parseSimpleOperand() {
    const Token &token = peek();
    if (token.is('{'))
      return parseGroup(Operand::Kind::Vector, '}');
    if (token.is('('))
      return parseGroup(Operand::Kind::List, ')');
    if (token.is('['))
      return parseGroup(Operand::Kind::Address, ']');
    if (token.kind == TokenKind::Name || token.is('!'))
      return parseNamed();
    return parseNumber();
  }

  Operand parseGroup(Operand::Kind kind, char close) {
    Nesting nesting(*this);
    Operand group;
    group.kind = kind;
    take();
    while (!takeIf(close)) {
      group.parts.push_back(parseOperand());
      if (!takeIf(',') && !peek().is(close))
        fail(std::string("',' or '") + close + "'");
    }
    return group;
  }

  Operand parseNamed() {
    Operand operand;
    operand.negated = takeIf('!');
    operand.kind = Operand::Kind::Name;
    operand.name = takeName("an operand");
    // Special registers and vector elements: %tid.x
    while (peek().kind == TokenKind::Dot && peek().adjacent)
      operand.name += take().text;
    if (operand.name == "_")
      operand.kind = Operand::Kind::Sink;
    if (takeIf('+'))
      operand.offset = static_cast<i64>(takeInteger());
    else if (peek().is('-') && peek(1).kind == TokenKind::Number)
      operand.offset = static_cast<i64>(takeInteger());
    return operand;
  }

  Operand parseNumber() {
    bool negative = takeIf('-');
    if (peek().kind != TokenKind::Number)
      fail("an operand");
    std::string text(take().text);
    Operand operand;
    bool hexFloat =
        text.size() > 2 && text[0] == '0' &&
        std::string_view("fFdD").find(text[1]) != std::string_view::npos;
    if (hexFloat) {
      bool isDouble = text[1] == 'd' || text[1] == 'D';
      operand.kind = isDouble ? Operand::Kind::Float64 : Operand::Kind::Float32;
      operand.bits = std::strtoull(text.c_str() + 2, nullptr, 16);
      if (negative)
        operand.bits ^= isDouble ? 1ull << 63 : 1ull << 31;
      return operand;
    }
    bool isHex = text.size() > 1 && (text[1] == 'x' || text[1] == 'X');
    if (!isHex && text.find_first_of(".eE") != std::string::npos) {
      double value = std::strtod(text.c_str(), nullptr);
      operand.kind = Operand::Kind::Decimal;
      operand.bits = std::bit_cast<u64>(negative ? -value : value);
      return operand;
    }
    operand.kind = Operand::Kind::Integer;
    int base = text.size() > 1 && (text[1] == 'b' || text[1] == 'B') ? 2 : 0;
    operand.bits =
        std::strtoull(text.c_str() + (base == 2 ? 2 : 0), nullptr, base);
    if (negative)
      operand.bits = 0 - operand.bits;
    return operand;
  }

  /// One more level of braces or brackets within an operand. Every level takes
  /// stack here and in the decoder.
  class Nesting {
  public:
    explicit Nesting(Parser &parser) : parser(parser) {
      if (++parser.depth > kMaxDepth)
        parser.fail("at most " + std::to_string(kMaxDepth) +
                    " nested brackets");
    }
    Nesting(const Nesting &) = delete;
    Nesting &operator=(const Nesting &) = delete;
    ~Nesting() { --parser.depth; }

  private:
    Parser &parser;
  };

  static constexpr u32 kMaxDepth = 64;
  static constexpr u64 kMaxAlignment = 1 << 16;
  static constexpr u64 kMaxElements = 1 << 28;

  u32 depth = 0;
  SourceLine source;
  SyntaxTree tree;
};

} // namespace

SyntaxTree parsePtx(std::string_view text) { return Parser(text).run(); }

} // namespace moe::sim
