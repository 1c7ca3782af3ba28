// Makes calls of two decoders that are loaded from one artifact:
//
//   decoder_calls ARTIFACT CALL..
//
// A call is ids, such as 5,17,3, or "reset"; of the second decoder where a "+"
// is in front. Prints the logits of each call, or its error.

#include "MoE/Runtime/Decoder.h"

#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

using namespace moe::runtime;

static std::vector<int64_t> parseIds(const std::string &text) {
  std::vector<int64_t> ids;
  std::istringstream stream(text);
  for (std::string id; std::getline(stream, id, ',');)
    ids.push_back(std::stoll(id));
  return ids;
}

static void call(Decoder &decoder, const std::string &text) {
  try {
    if (text == "reset") {
      decoder.reset();
      return;
    }
    Array logits = decoder.run(parseIds(text));
    auto *values = static_cast<const float *>(logits.tensor.data);
    for (int64_t i = 0; i < getNumElements(logits.tensor.shape); ++i)
      std::printf("%.9g ", values[i]);
    std::printf("\n");
  } catch (const std::exception &error) {
    std::printf("error: %s\n", error.what());
  }
}

int main(int argc, char **argv) {
  try {
    Decoder first(argv[1]), second(argv[1], Verification::All);
    for (int i = 2; i < argc; ++i) {
      bool isSecond = argv[i][0] == '+';
      call(isSecond ? second : first, argv[i] + isSecond);
    }
    std::printf("%lld of %lld, %lld of %lld; %lld sequences, %lld words\n",
                static_cast<long long>(first.getPosition()),
                static_cast<long long>(first.getRoom()),
                static_cast<long long>(second.getPosition()),
                static_cast<long long>(second.getRoom()),
                static_cast<long long>(first.getSequences()),
                static_cast<long long>(first.getVocabularySize()));
  } catch (const std::exception &error) {
    std::printf("error: %s\n", error.what());
    return 1;
  }
  return 0;
}
