//===- Report.cpp - A report as text and as JSON --------------------------===//

#include "MoE/Simulator/Simulator.h"

#include <cstdio>

namespace moe::sim {
namespace {

std::string quote(const std::string &text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", c);
      out += buffer;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

using Entry = std::pair<const char *, uint64_t>;

std::vector<Entry> entries(const Counters &c) {
  return {{"warp_instructions", c.warpInstructions},
          {"lane_instructions", c.laneInstructions},
          {"barriers", c.barriers},
          {"atomics", c.atomics},
          {"shared_requests", c.sharedRequests},
          {"shared_wavefronts", c.sharedWavefronts},
          {"shared_bytes_read", c.sharedBytesRead},
          {"shared_bytes_written", c.sharedBytesWritten},
          {"global_requests", c.globalRequests},
          {"global_sectors", c.globalSectors},
          {"global_bytes_read", c.globalBytesRead},
          {"global_bytes_written", c.globalBytesWritten}};
}

} // namespace

std::string Report::text() const {
  std::string out;
  for (const Finding &finding : findings) {
    out += std::string(name(finding.kind)) + ": " + finding.message;
    if (finding.count > 1)
      out += " (" + std::to_string(finding.count) + " times)";
    out += "\n";
  }
  out += "kernel " + kernel + ": " +
         (findings.empty() ? std::string("no findings")
                           : std::to_string(findings.size()) + " findings") +
         "\n";
  for (auto [key, value] : entries(counters))
    out += "  " + std::string(key) + ": " + std::to_string(value) + "\n";
  for (const auto &[opcode, count] : counters.instructions)
    out += "  " + opcode + ": " + std::to_string(count) + "\n";
  return out;
}

std::string Report::json() const {
  std::string out = "{\"kernel\": " + quote(kernel) + ", \"findings\": [";
  for (const Finding &f : findings) {
    out += &f == &findings.front() ? "" : ", ";
    out += "{\"kind\": " + quote(name(f.kind)) +
           ", \"message\": " + quote(f.message) +
           ", \"kernel\": " + quote(f.kernel) +
           ", \"line\": " + std::to_string(f.line) +
           ", \"source\": " + quote(f.source) + ", \"block\": [" +
           std::to_string(f.block[0]) + ", " + std::to_string(f.block[1]) +
           ", " + std::to_string(f.block[2]) +
           "], \"warp\": " + std::to_string(f.warp) +
           ", \"lane\": " + std::to_string(f.lane) +
           ", \"other\": " + quote(f.other) +
           ", \"count\": " + std::to_string(f.count) + "}";
  }
  out += "], \"counters\": {";
  for (auto [key, value] : entries(counters))
    out += quote(key) + ": " + std::to_string(value) + ", ";
  out += "\"instructions\": {";
  bool first = true;
  for (const auto &[opcode, count] : counters.instructions) {
    out += (first ? "" : ", ") + quote(opcode) + ": " + std::to_string(count);
    first = false;
  }
  out += "}, \"lines\": {";
  first = true;
  for (auto [line, count] : counters.lines) {
    out += (first ? "\"" : ", \"") + std::to_string(line) +
           "\": " + std::to_string(count);
    first = false;
  }
  out += "}}, \"shared_trace\": [";
  for (const SharedEvent &e : sharedTrace) {
    out += &e == &sharedTrace.front() ? "[" : ", [";
    for (uint64_t value :
         {uint64_t(e.kind), uint64_t(e.block), uint64_t(e.warp),
          uint64_t(e.lane), uint64_t(e.line), e.offset})
      out += std::to_string(value) + ", ";
    out += std::to_string(e.bytes) + "]";
  }
  out += "], \"text\": " + quote(text()) + "}";
  return out;
}

} // namespace moe::sim
