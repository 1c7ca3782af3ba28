//===- Input.cpp - Reading and running IR without crashing ----------------===//

#include "MoE/Target/Input.h"

#include "MoE/InitAll.h"
#include "MoE/Support/ElementBytes.h"
#include "MoE/Target/PhaseDump.h"
#include "mlir/Bytecode/BytecodeReader.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/IR/DialectRegistry.h"
#include "mlir/IR/Remarks.h"
#include "mlir/IR/SymbolTable.h"
#include "mlir/IR/Verifier.h"
#include "mlir/Parser/Parser.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Pass/PassRegistry.h"
#include "llvm/Support/CheckedArithmetic.h"
#include "llvm/Support/JSON.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"

using namespace mlir;
using namespace mlir::moe;

std::unique_ptr<MLIRContext> mlir::moe::createContext() {
  static const DialectRegistry &registry = []() -> DialectRegistry & {
    static DialectRegistry registry;
    registerEverything(registry);
    return registry;
  }();
  auto context =
      std::make_unique<MLIRContext>(registry, MLIRContext::Threading::DISABLED);
  // The operation of a diagnostic can be a whole module of constants.
  context->printOpOnDiagnostic(false);
  return context;
}

void mlir::moe::enableRemarks(MLIRContext &context) {
  const std::string ours = "moe-.*";
  remark::RemarkCategories categories{/*all=*/std::nullopt, /*passed=*/ours,
                                      /*missed=*/ours, /*analysis=*/ours,
                                      /*failed=*/ours};
  // Fails only for a streamer that cannot open its file, and there is none.
  (void)remark::enableOptimizationRemarks(
      context, /*streamer=*/nullptr,
      std::make_unique<remark::RemarkEmittingPolicyAll>(), categories,
      /*printAsEmitRemarks=*/true);
}

//===----------------------------------------------------------------------===//
// Guards
//===----------------------------------------------------------------------===//

namespace {
/// The first place of a text where brackets are nested too deeply.
struct TooDeep {
  unsigned line, column;
};
} // namespace

/// Counts brackets the way the lexer sees them: not in strings or comments, and
/// without the angle signs of arrows and comparisons.
static std::optional<TooDeep> findTooDeep(StringRef text, unsigned limit) {
  unsigned depth = 0, line = 1;
  size_t lineStart = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    char next = i + 1 < text.size() ? text[i + 1] : '\0';
    switch (text[i]) {
    case '\n':
      ++line;
      lineStart = i + 1;
      break;
    case '"':
      for (++i; i < text.size() && text[i] != '"' && text[i] != '\n'; ++i)
        if (text[i] == '\\')
          ++i;
      break;
    case '/':
      if (next == '/')
        i = std::min(text.find('\n', i), text.size()) - 1;
      break;
    case '-':
      i += next == '>';
      break;
    case '<':
    case '>':
      if (next == '=') {
        ++i;
        break;
      }
      [[fallthrough]];
    case '(':
    case '[':
    case '{':
    case ')':
    case ']':
    case '}':
      if (StringRef("<([{").contains(text[i])) {
        if (++depth > limit)
          return TooDeep{line, static_cast<unsigned>(i - lineStart + 1)};
      } else if (depth) {
        --depth;
      }
      break;
    }
  }
  return std::nullopt;
}

/// Static shapes whose size in bytes does not fit half the address space wrap
/// around silently in the lowering.
static bool sizeOverflows(Type type) {
  auto shaped = dyn_cast<ShapedType>(type);
  if (!shaped || !shaped.hasRank())
    return false;
  std::optional<int64_t> bytes = getElementBytes(shaped.getElementType());
  for (int64_t size : shaped.getShape())
    if (!ShapedType::isDynamic(size) && bytes)
      bytes = llvm::checkedMul(*bytes, size);
  return !bytes || *bytes > std::numeric_limits<int64_t>::max() / 2;
}

static LogicalResult verifySizes(ModuleOp module) {
  WalkResult result = module.walk([](Operation *op) {
    auto check = [op](Type type) -> LogicalResult {
      if (!sizeOverflows(type))
        return success();
      return op->emitError()
             << "expected a type of at most 2^62 bytes, found " << type;
    };
    for (Type type : op->getResultTypes())
      if (failed(check(type)))
        return WalkResult::interrupt();
    for (Region &region : op->getRegions())
      for (Block &block : region)
        for (Type type : block.getArgumentTypes())
          if (failed(check(type)))
            return WalkResult::interrupt();
    return WalkResult::advance();
  });
  return failure(result.wasInterrupted());
}

//===----------------------------------------------------------------------===//
// Parsing and passes
//===----------------------------------------------------------------------===//

OwningOpRef<ModuleOp> mlir::moe::parseInput(MLIRContext &context,
                                            StringRef source, StringRef name,
                                            const InputOptions &options) {
  auto at = [&](unsigned line, unsigned column) {
    return FileLineColLoc::get(&context, name, line, column);
  };
  bool bytecode = isBytecode(llvm::MemoryBufferRef(source, name));
  if (bytecode && !options.allowBytecode) {
    emitError(at(1, 1)) << "expected MLIR text, found bytecode; pass "
                           "--allow-bytecode if you trust the file";
    return nullptr;
  }
  if (!bytecode) {
    if (source.contains('\0')) {
      emitError(at(1, 1)) << "expected MLIR text, found a NUL byte";
      return nullptr;
    }
    if (auto place = findTooDeep(source, options.nestingLimit)) {
      emitError(at(place->line, place->column))
          << "expected at most " << options.nestingLimit
          << " levels of brackets, found more; raise the nesting limit if the "
             "input is meant";
      return nullptr;
    }
  }
  OwningOpRef<ModuleOp> module =
      parseSourceString<ModuleOp>(source, ParserConfig(&context), name);
  if (!module || failed(verifySizes(*module)))
    return nullptr;
  return module;
}

LogicalResult mlir::moe::runPipeline(ModuleOp module, StringRef pipeline,
                                     StringRef dumpDir) {
  MLIRContext *context = module.getContext();
  pipeline = pipeline.trim();
  std::string message;
  llvm::raw_string_ostream stream(message);

  // With an anchor the parsed manager is the whole pipeline; adding it to
  // another one would nest a module inside the module, and run nothing.
  std::optional<PassManager> manager;
  if (pipeline.starts_with("builtin.module(")) {
    FailureOr<OpPassManager> parsed = parsePassPipeline(pipeline, stream);
    if (succeeded(parsed)) {
      manager.emplace(context, ModuleOp::getOperationName());
      static_cast<OpPassManager &>(*manager) = std::move(*parsed);
    }
  } else {
    manager.emplace(context, ModuleOp::getOperationName());
    if (failed(parsePassPipeline(pipeline, *manager, stream)))
      manager.reset();
  }
  if (!manager)
    return module.emitError() << "expected a pass pipeline, found '" << pipeline
                              << "': " << StringRef(message).trim();
  if (!dumpDir.empty())
    manager->addInstrumentation(
        std::make_unique<PhaseDump>(dumpDir, module.getOperation()));
  // Our own pipelines are known to leave valid IR behind each pass; looking
  // again after every one is a fifth of a small compilation.
  manager->enableVerifier(!pipeline.starts_with("moe-to-"));
  if (failed(manager->run(module)))
    return failure();
  return verify(module);
}

LogicalResult mlir::moe::addModule(ModuleOp module, ModuleOp part,
                                   StringRef name) {
  for (auto symbol : part.getOps<SymbolOpInterface>()) {
    std::string own =
        symbol.isPublic() ? name.str() : (name + "_" + symbol.getName()).str();
    auto renamed = StringAttr::get(part.getContext(), own);
    Operation *other = part.lookupSymbol(renamed);
    if (module.lookupSymbol(renamed) || (other && other != symbol))
      return symbol.emitError() << "expected one public function in each "
                                   "program, found a second '"
                                << own << "'";
    if (failed(SymbolTable::replaceAllSymbolUses(symbol, renamed, part)))
      return failure();
    symbol.setName(renamed);
  }
  Block *body = module.getBody();
  body->getOperations().splice(body->end(), part.getBody()->getOperations());
  return success();
}

//===----------------------------------------------------------------------===//
// DiagnosticCollector
//===----------------------------------------------------------------------===//

/// The file position behind a location: the first one that it names.
static FileLineColLoc findFileLocation(Location location) {
  FileLineColLoc found;
  location->walk([&](Location nested) {
    found = dyn_cast<FileLineColLoc>(nested);
    return found ? WalkResult::interrupt() : WalkResult::advance();
  });
  return found;
}

static void printLocation(llvm::raw_ostream &stream, Location location) {
  if (FileLineColLoc file = findFileLocation(location)) {
    stream << file.getFilename().getValue();
    // The module that the parser adds around a file stands at line 0.
    if (file.getLine())
      stream << ":" << file.getLine() << ":" << file.getColumn();
  } else if (isa<UnknownLoc>(location))
    stream << "<unknown>";
  else
    stream << LocationAttr(location);
  if (auto call = dyn_cast<CallSiteLoc>(location)) {
    stream << " called from ";
    printLocation(stream, call.getCaller());
  }
}

static void printMessage(llvm::raw_ostream &stream, Diagnostic &diagnostic) {
  static constexpr StringLiteral names[] = {"note", "warning", "error",
                                            "remark"};
  printLocation(stream, diagnostic.getLocation());
  stream << ": " << names[static_cast<unsigned>(diagnostic.getSeverity())]
         << ": " << diagnostic;
}

DiagnosticCollector::DiagnosticCollector(MLIRContext &context)
    : handler(&context,
              [this](Diagnostic &diagnostic) { return handle(diagnostic); }) {}

void DiagnosticCollector::setSource(StringRef text, StringRef name) {
  source = text;
  sourceName = name;
}

std::string DiagnosticCollector::sourceLine(Location location) const {
  FileLineColLoc file = findFileLocation(location);
  if (!file || file.getFilename() != sourceName || !file.getLine())
    return "";
  StringRef rest = source;
  for (unsigned line = 1; line < file.getLine(); ++line)
    rest = rest.split('\n').second;
  StringRef text = rest.split('\n').first;
  // A line of megabytes helps nobody, and bytecode has no lines.
  if (text.size() > 200 || text.trim().empty() || !llvm::json::isUTF8(text))
    return "";
  std::string caret(std::max(file.getColumn(), 1u) - 1, ' ');
  return ("\n  " + text + "\n  " + caret + "^").str();
}

LogicalResult DiagnosticCollector::handle(Diagnostic &diagnostic) {
  std::string text;
  llvm::raw_string_ostream stream(text);
  printMessage(stream, diagnostic);
  stream << sourceLine(diagnostic.getLocation());
  for (Diagnostic &note : diagnostic.getNotes()) {
    stream << "\n";
    printMessage(stream, note);
  }
  bool isError = diagnostic.getSeverity() == DiagnosticSeverity::Error;
  if (isError)
    errors.push_back(text);
  else
    add(text);
  return success();
}

void DiagnosticCollector::add(const std::string &text) {
  auto [known, isNew] = said.try_emplace(text, others.size(), 1);
  auto &[place, count] = known->second;
  if (isNew)
    return others.push_back(text);
  auto [first, rest] = StringRef(text).split('\n');
  others[place] = (first + " (" + Twine(++count) + " times)").str();
  if (!rest.empty())
    others[place] += ("\n" + rest).str();
}
