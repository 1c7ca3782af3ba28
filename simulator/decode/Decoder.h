//===- Decoder.h - Syntax tree to decoded kernels ---------------*- C++ -*-===//
//
// The decoder walks one kernel's statements, keeps the scopes of registers,
// variables and labels, and hands each instruction to the function for its
// family. Calls are decoded in place (PTX from compilers does not recurse), so
// the scheduler needs no call stack.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_DECODER_H
#define MOE_LIB_SIMULATOR_DECODER_H

#include "Program.h"
#include "execute/Handlers.h"

#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace moe::sim {

/// An instruction under construction.
struct Draft {
  Inst inst;
  std::vector<u32> d;
  std::vector<u32> s;
};

/// What all kernels of a module share while they are decoded.
struct ModuleContext {
  Program &program;
  /// "line 12: unknown instruction foo.bar", in order of appearance.
  std::vector<std::string> problems;
  std::set<std::string> seenProblems;
  std::unordered_map<std::string, u16> opcodeIndex;
};

class Decoder {
public:
  Decoder(ModuleContext &module, Kernel &kernel, const Function &function)
      : module(module), kernel(kernel), function(function) {}

  void run();

  //===--- For the families -----------------------------------------------===//

  /// A destination register of `bytes` bytes; kNone for `_`. Wider registers
  /// are refused unless `bytes` is 0, which takes any.
  u32 destination(const Operand &operand, u32 bytes);
  /// Appends the destinations of `d`, `d|p` or `{a, b}`.
  void destinations(Draft &draft, const Operand &operand, u32 bytes);
  u32 source(const Operand &operand, u32 bytes, bool isFloat = false);
  void sources(Draft &draft, const Operand &operand, u32 bytes,
               bool isFloat = false);
  /// A source predicate; negation costs an extra instruction.
  u32 predicate(const Operand &operand);
  u32 predicateDestination(const Operand &operand);
  /// `[base+offset]` into s[0], imm and wideAddress.
  void address(Draft &draft, const Operand &operand);
  /// A shared or global address as an operand of its own; `wide` is set if the
  /// register has 64 bits. The offset comes back in `offset`.
  u32 addressOperand(const Operand &operand, bool &wide, i64 &offset);
  /// Bytes of a register operand; 0 if it is no register.
  u32 registerWidth(const Operand &operand);
  /// The variable that a name stands for.
  struct Symbol {
    enum class Kind : u8 { Register, Memory, Label } kind;
    u32 offset = 0; // register file
    u32 bytes = 0;
    Space space = Space::Generic;
    u64 address = 0;
    bool dynamicShared = false;
    bool functionParam = false;
  };
  const Symbol *memorySymbol(const Operand &operand);

  /// A register that only the next instruction reads; one for each size.
  u32 temporary(u32 bytes);
  /// A register of its own.
  u32 scratch(u32 bytes);
  /// A 16-bit register as one of 32 bits.
  u32 widened(u32 place);
  u32 constant(u64 value, u32 bytes);
  u32 constantPredicate(bool value);
  /// The condition code register's carry.
  u32 carryFlag();

  void emit(Draft draft);
  /// As emit, for helpers that are no instruction of the kernel.
  void emitHidden(Draft draft);
  u32 nextPc() const { return static_cast<u32>(kernel.code.size()); }
  Inst &at(u32 pc) { return kernel.code[pc]; }

  /// Looks the handler up; notes the instruction as unknown if there is none.
  Handler handler(const std::string &key);
  void unknown(const std::string &why = {});
  [[noreturn]] void fail(const std::string &what) const;

  ModuleContext &module;
  Kernel &kernel;
  const Instruction *current = nullptr;

private:
  struct Range {
    u32 bytes;
    i64 count;
  };
  struct Scope {
    std::unordered_map<std::string, Symbol> symbols;
    std::unordered_map<std::string, Range> ranges;
    std::unordered_map<std::string, std::vector<std::string>> branchTargets;
    /// Names of an enclosing function's caller are not visible.
    bool isFunction = false;
  };
  struct Fixup {
    u32 pc;
    u32 label;
  };

  void declareParams();
  void body(const std::vector<Statement> &statements, size_t begin, size_t end);
  void openScope(const std::vector<Statement> &statements, size_t begin);
  void declareRegisters(const RegisterDeclaration &declaration);
  void declareVariable(const Variable &variable);
  Symbol *lookup(const std::string &name);
  Symbol *lookupRegister(const std::string &name);
  Symbol moduleSymbol(const Variable &variable);
  u32 allocateRegister(u32 bytes);
  u64 allocateShared(const Variable &variable);
  std::optional<SpecialRegister> specialRegister(const std::string &name);
  u32 special(SpecialRegister which, u32 bytes);
  u32 presetArray(Preset preset, const std::string &key);
  u32 variableAddress(const Symbol &symbol, i64 offset, u32 bytes);

  void instruction(const Instruction &instruction);
  void branch(const Instruction &instruction);
  void branchIndexed(const Instruction &instruction);
  void call(const Instruction &instruction);
  void externalCall(const std::string &callee);
  void bindParams(const Function &callee, Scope &scope,
                  const std::vector<Operand> &arguments,
                  const std::vector<Variable> &params);
  u32 labelOf(const std::string &name);
  void finish();
  void markWgmmaOperands();

  const Function &function;
  std::vector<Scope> scopes;
  std::vector<u32> labelPcs;
  std::vector<Fixup> fixups;
  std::vector<std::pair<u32, u32>> tableFixups; // table, entry
  std::vector<u32> returnLabels;
  std::vector<std::string> callStack;
  std::vector<std::pair<u32, u32>> operandStarts;
  std::unordered_map<std::string, u32> presets;
  std::unordered_map<std::string, u64> sharedVariables;
  std::vector<size_t> dynamicPresets;
  std::map<u32, u32> registerBytes;
  u32 guard = kNone;
  bool hidden = false;
};

/// Decodes one instruction of a family; false if the family does not know it.
using Family = bool (*)(Decoder &, const Instruction &);
bool decodeScalar(Decoder &decoder, const Instruction &instruction);
bool decodeConversion(Decoder &decoder, const Instruction &instruction);
bool decodeMemory(Decoder &decoder, const Instruction &instruction);
bool decodeWarp(Decoder &decoder, const Instruction &instruction);
bool decodeMatrix(Decoder &decoder, const Instruction &instruction);
bool decodeAsync(Decoder &decoder, const Instruction &instruction);

/// `.relaxed.gpu` and so on.
void decodeOrder(Inst &inst, const Instruction &instruction);
/// The state space that the opcode names; Generic if none.
Space decodeSpace(const Instruction &instruction);
bool isFloatType(std::string_view type);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_DECODER_H
