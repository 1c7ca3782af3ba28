//===- Decoder.cpp - Language models with their caches --------------------===//

#include "MoE/Runtime/Decoder.h"

#include "DecoderProgram.h"
#include "Functions.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>

namespace moe::runtime {
namespace {

[[noreturn]] void refuse(const std::string &expectation) {
  throw std::runtime_error(std::string(kDecoderFile) + ": expected " +
                           expectation);
}

int64_t readPositive(const Json &description, const char *name) {
  int64_t value = description.at(name).integer();
  if (value < 1)
    refuse("a positive '" + std::string(name) + "', found " +
           std::to_string(value));
  return value;
}

} // namespace

struct Decoder::Contents {
  explicit Contents(ArtifactFiles files) : stored(std::move(files.weights)) {
    Json description = Json::parse(files.get(kDecoderFile), kDecoderFile);
    room = readPositive(description, "room");
    sequences = readPositive(description, "sequences");
    vocabulary = readPositive(description, "vocabulary");
    readState(description);
    readPrograms(description.at("programs").array(), loadHostFunctions(files));
  }

  void readState(const Json &description) {
    for (const Json &entry : description.at("state").array()) {
      const StateTensor &tensor = tensors.list.emplace_back(entry, stored);
      if (!tensors.numbers.emplace(tensor.getName(), tensors.numbers.size())
               .second)
        refuse("each tensor of the state once, found '" + tensor.getName() +
               "' again");
      initial.shapes.push_back(tensor.getFirstShape());
    }
    for (const Json &program : description.at("programs").array())
      if (const Json *makes = program.find("makes"))
        for (const Json &entry : makes->array())
          tensors.made.insert(tensors.find(entry.at("name").string()));
    // Of others the code says the size.
    for (size_t number : tensors.made)
      if (tensors.list[number].startsWithZeros())
        refuse("a first value of '" + tensors.list[number].getName() +
               "', which calls make, or no elements, found zeros");
    initial.form = description.at("form").integer();
    for (const Json &counter : description.at("counters").array()) {
      initial.counters.push_back(counter.integer());
      if (initial.counters.back() < 0 || initial.counters.back() > room)
        refuse("counters within the room for " + std::to_string(room) +
               " tokens, found " + std::to_string(initial.counters.back()));
    }
    state = initial;
  }

  void readPrograms(const Json::Array &list,
                    std::vector<std::unique_ptr<Function>> functions) {
    for (const Json &program : list) {
      const std::string &name = program.at("function").string();
      auto function =
          std::ranges::find_if(functions, [&](const auto &candidate) {
            return candidate && candidate->getName() == name;
          });
      if (function == functions.end())
        refuse("a function of the manifest once for each program, found '" +
               name + "'");
      programs.emplace_back(program, std::move(*function), stored, tensors,
                            initial, sequences);
      if (programs.back().getNumWords() != programs.front().getNumWords())
        refuse("logits of " + std::to_string(programs.front().getNumWords()) +
               " words, found " +
               std::to_string(programs.back().getNumWords()) + " of '" + name +
               "'");
    }
    if (programs.empty())
      refuse("a program, found none");
    // What none uses may be of any size.
    for (const auto &[name, number] : tensors.numbers)
      if (std::ranges::none_of(programs, [&](const DecoderProgram &program) {
            return program.uses(number);
          }))
        refuse("a program for each tensor of the state, found none for '" +
               name + "'");
  }

  std::unique_lock<std::mutex> acquire() {
    std::unique_lock<std::mutex> lock(underWay, std::try_to_lock);
    if (!lock)
      throw std::runtime_error("expected one call of a decoder at a time, "
                               "found another under way; load the artifact "
                               "once for each sequence");
    return lock;
  }

  /// The number of tokens of each sequence. Throws where no call may have
  /// these ids now.
  int64_t verifyIds(std::span<const int64_t> ids) const {
    auto count = static_cast<int64_t>(ids.size());
    if (count == 0 || count % sequences != 0)
      throw std::runtime_error(
          "expected ids of " + std::to_string(sequences) +
          " sequences, at least one of each and as many of each, found " +
          std::to_string(count));
    auto other = std::ranges::find_if(
        ids, [&](int64_t id) { return id < 0 || id >= vocabulary; });
    if (other != ids.end())
      throw std::runtime_error("expected ids in [0, " +
                               std::to_string(vocabulary - 1) + "], found " +
                               std::to_string(*other) + " at place " +
                               std::to_string(other - ids.begin()));
    int64_t tokens = count / sequences;
    if (tokens > room - position)
      throw std::runtime_error(
          "expected at most " + std::to_string(room - position) +
          " tokens, which the decoder of room " + std::to_string(room) +
          " has room for beside the " + std::to_string(position) +
          " that it holds, found " + std::to_string(tokens) +
          "; call reset, or save a decoder with more room");
    return tokens;
  }

  void verifyWhole() const {
    if (!isWhole)
      throw std::runtime_error(
          "expected a reset of the decoder after a call that failed, which "
          "may have updated a part of its state, found another call");
  }

  /// A call of one program, for a part of the tokens.
  struct Piece {
    DecoderProgram *program;
    int64_t begin, tokens;
    DecoderState state, next;
  };

  std::optional<Piece> findPiece(const DecoderState &at, int64_t begin,
                                 int64_t tokens) {
    for (DecoderProgram &program : programs)
      if (program.bind({"i64", {sequences, tokens}}, at))
        return Piece{&program, begin, tokens, at, program.computeNext(at)};
    return std::nullopt;
  }

  /// The next piece of `rest` tokens: all, or the most that an empty cache can
  /// take, or one.
  Piece planPiece(const DecoderState &at, int64_t begin, int64_t rest) {
    bool isEmpty = position + begin == 0;
    for (int64_t tokens = rest; tokens > 0;
         tokens = isEmpty || tokens == 1 ? tokens - 1 : 1)
      if (auto piece = findPiece(at, begin, tokens))
        return std::move(*piece);
    throw std::runtime_error(
        "expected a number of tokens that the artifact has code for, found " +
        std::to_string(rest) + " after " + std::to_string(position + begin) +
        "; save it again");
  }

  std::vector<Piece> plan(int64_t tokens) {
    std::vector<Piece> pieces;
    for (int64_t begin = 0; begin < tokens; begin += pieces.back().tokens)
      pieces.push_back(planPiece(pieces.empty() ? state : pieces.back().next,
                                 begin, tokens - begin));
    return pieces;
  }

  void runPiece(const Piece &piece, std::span<const int64_t> ids,
                const Tensor &logits) {
    std::vector<int64_t> part;
    auto tokens = static_cast<int64_t>(ids.size()) / sequences;
    for (int64_t i = 0; i < sequences; ++i) {
      auto begin = ids.begin() + i * tokens + piece.begin;
      part.insert(part.end(), begin, begin + piece.tokens);
    }
    piece.program->bind({"i64", {sequences, piece.tokens}, part.data()},
                        piece.state);
    piece.program->run(logits, tensors.list, piece.next);
  }

  Array run(std::span<const int64_t> ids) {
    std::unique_lock<std::mutex> lock = acquire();
    verifyWhole();
    int64_t tokens = verifyIds(ids);
    std::vector<Piece> pieces = plan(tokens);
    Array logits("f32", {sequences, programs[0].getNumWords()});
    isWhole = false;
    for (const Piece &piece : pieces)
      runPiece(piece, ids, logits.tensor);
    isWhole = true;
    state = std::move(pieces.back().next);
    position += tokens;
    return logits;
  }

  void reset() {
    std::unique_lock<std::mutex> lock = acquire();
    for (StateTensor &tensor : tensors.list)
      tensor.reset();
    state = initial;
    position = 0;
    isWhole = true;
  }

  StoredTensors stored;
  int64_t room, sequences, vocabulary;
  DecoderTensors tensors;
  std::vector<DecoderProgram> programs;
  DecoderState initial, state;
  int64_t position = 0;
  std::mutex underWay;
  bool isWhole = true;
};

static ArtifactFiles readDecoder(const std::string &folder,
                                 Verification verification) {
  ArtifactFiles files = readArtifact(folder, verification);
  if (!files.contents.contains(kDecoderFile))
    throw std::runtime_error("expected a decoder of moe_mlir.save_decoder in " +
                             folder +
                             ", found other functions; load them with "
                             "moe::runtime::Artifact");
  if (!files.weights)
    throw std::runtime_error("expected '" + std::string(kWeightsFile) +
                             "' in the artifact " + folder +
                             ", found none; save it again");
  return files;
}

Decoder::Decoder(const std::string &folder, Verification verification)
    : contents(std::make_unique<Contents>(readDecoder(folder, verification))) {}

Decoder::~Decoder() = default;
Decoder::Decoder(Decoder &&) noexcept = default;
Decoder &Decoder::operator=(Decoder &&) noexcept = default;

Array Decoder::run(std::span<const int64_t> ids) { return contents->run(ids); }

void Decoder::reset() { contents->reset(); }

int64_t Decoder::getPosition() const { return contents->position; }

int64_t Decoder::getRoom() const { return contents->room; }

int64_t Decoder::getSequences() const { return contents->sequences; }

int64_t Decoder::getVocabularySize() const { return contents->vocabulary; }

} // namespace moe::runtime
