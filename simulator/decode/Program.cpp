//===- Program.cpp - Loads a module ---------------------------------------===//

#include "Program.h"
#include "Decoder.h"

#include <cstring>
#include <stdexcept>

namespace moe::sim {
namespace {

constexpr u64 kGlobalAlignment = 256;

void splitLines(std::string_view text, std::vector<std::string> &lines) {
  while (!text.empty()) {
    size_t end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos)
      return;
    text.remove_prefix(end + 1);
  }
}

void allocateGlobals(Program &program) {
  for (const Variable &variable : program.tree.variables) {
    if (variable.space == Space::Shared)
      continue;
    GlobalVariable global;
    global.name = variable.name;
    global.space = variable.space;
    global.bytes = variable.bytes();
    global.storage =
        std::make_unique<u8[]>(global.bytes + 2 * kGlobalAlignment);
    u64 base = reinterpret_cast<u64>(global.storage.get());
    global.data =
        global.storage.get() + (kGlobalAlignment - base % kGlobalAlignment);
    program.globals.push_back(std::move(global));
  }
}

u64 addressOf(const Program &program, const std::string &name) {
  for (const GlobalVariable &global : program.globals)
    if (global.name == name)
      return reinterpret_cast<u64>(global.data);
  throw std::invalid_argument("unknown variable '" + name +
                              "' in an initialiser");
}

void initializeGlobals(Program &program) {
  for (const Variable &variable : program.tree.variables) {
    if (variable.space == Space::Shared)
      continue;
    u8 *data = reinterpret_cast<u8 *>(addressOf(program, variable.name));
    u64 offset = 0;
    for (const Initializer &value : variable.initializers) {
      u64 bits = value.bits;
      if (!value.symbol.empty())
        bits += addressOf(program, value.symbol);
      u64 bytes = std::min<u64>(variable.elementBytes, 8);
      if (offset + bytes > variable.bytes())
        throw std::invalid_argument("expected at most " +
                                    std::to_string(variable.count) +
                                    " initialisers for " + variable.name);
      std::memcpy(data + offset, &bits, bytes);
      offset += variable.elementBytes;
    }
  }
}

} // namespace

std::unique_ptr<Program> decode(std::string_view text) {
  auto program = std::make_unique<Program>();
  program->tree = parsePtx(text);
  splitLines(text, program->lines);
  allocateGlobals(*program);
  initializeGlobals(*program);
  ModuleContext context{*program, {}, {}, {}};
  for (const auto &[name, function] : program->tree.functions) {
    if (!function.isKernel || !function.hasBody)
      continue;
    auto kernel = std::make_unique<Kernel>();
    try {
      Decoder(context, *kernel, function).run();
    } catch (const std::out_of_range &) {
      // An operand that the instruction must have is not there.
      context.problems.push_back("kernel " + name +
                                 ": an instruction has too few operands");
    }
    program->kernels[name] = std::move(kernel);
  }
  if (context.problems.empty())
    return program;
  std::string message;
  for (const std::string &problem : context.problems)
    message += (message.empty() ? "" : "\n") + problem;
  throw std::invalid_argument(message);
}

} // namespace moe::sim
