//===- ObjectCode.cpp - Relocatable objects in memory ---------------------===//
//
// One anonymous mapping holds, in this order and each on pages of its own: code
// with the stubs for functions of this runtime, read-only data with their
// addresses, and writable data. It is written first and only then gets its
// final protection, so no page is ever writable and executable.
//
//===----------------------------------------------------------------------===//

#include "ObjectCode.h"

#include "MoE/Runtime/HostSymbols.h"

#include <cstdint>
#include <cstring>
#include <elf.h>
#include <limits>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace moe::runtime {
namespace {

constexpr size_t kStubBytes = 8;

[[noreturn]] void refuse(const std::string &what) {
  throw std::runtime_error("kernel.o: " + what);
}

size_t alignTo(size_t value, size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

/// Where the parts of the mapping start.
enum Part { kCode, kConstants, kData, kNumParts };

class Linker {
public:
  explicit Linker(std::string_view bytes) : bytes(bytes) {
    readSections();
    placeSections();
  }

  size_t getSize() const { return size; }

  /// Fills `memory` with the sections, bound to each other and to the process.
  void link(uint8_t *memory) {
    base = memory;
    for (size_t i = 0; i < sections.size(); ++i)
      if (isLoaded(i) && sections[i].sh_type != SHT_NOBITS)
        std::memcpy(base + places[i], content(sections[i]).data(),
                    sections[i].sh_size);
    bindExternals();
    for (const Elf64_Shdr &section : sections)
      if (section.sh_type == SHT_RELA && isLoaded(section.sh_info))
        relocate(section);
  }

  void protect() const {
    static constexpr int protections[] = {PROT_READ | PROT_EXEC, PROT_READ,
                                          PROT_READ | PROT_WRITE};
    for (int part = 0; part < kNumParts; ++part)
      if (partEnds[part] > partStarts[part] &&
          mprotect(base + partStarts[part], partEnds[part] - partStarts[part],
                   protections[part]))
        refuse(std::string("cannot protect the code: ") + strerror(errno));
  }

  std::map<std::string, void *, std::less<>> getGlobals() const {
    std::map<std::string, void *, std::less<>> globals;
    for (const Elf64_Sym &symbol : symbols)
      if (ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL &&
          symbol.st_shndx != SHN_UNDEF)
        globals[getName(symbol)] = base + getPlace(symbol);
    return globals;
  }

private:
  /// A view of part of the file, checked.
  std::string_view slice(uint64_t offset, uint64_t length) const {
    if (offset > bytes.size() || length > bytes.size() - offset)
      refuse("ends before what its headers announce");
    return bytes.substr(offset, length);
  }

  std::string_view content(const Elf64_Shdr &section) const {
    return slice(section.sh_offset, section.sh_size);
  }

  template <typename T>
  std::vector<T> readTable(uint64_t offset, uint64_t count) const {
    if (count > bytes.size() / sizeof(T))
      refuse("ends before what its headers announce");
    std::vector<T> table(count);
    std::memcpy(table.data(), slice(offset, count * sizeof(T)).data(),
                count * sizeof(T));
    return table;
  }

  void readSections() {
    auto header = readTable<Elf64_Ehdr>(0, 1)[0];
    if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_type != ET_REL ||
        header.e_machine != EM_X86_64 ||
        header.e_shentsize != sizeof(Elf64_Shdr))
      refuse(
          "expected a relocatable ELF object for x86-64, found another file");
    sections = readTable<Elf64_Shdr>(header.e_shoff, header.e_shnum);
    for (const Elf64_Shdr &section : sections) {
      if (section.sh_type != SHT_SYMTAB)
        continue;
      symbols = readTable<Elf64_Sym>(section.sh_offset,
                                     section.sh_size / sizeof(Elf64_Sym));
      if (section.sh_link >= sections.size())
        refuse("expected a table of names, found none");
      names = content(sections[section.sh_link]);
    }
  }

  bool isLoaded(size_t section) const {
    return section < sections.size() &&
           (sections[section].sh_flags & SHF_ALLOC) &&
           sections[section].sh_size > 0;
  }

  static Part getPart(const Elf64_Shdr &section) {
    if (section.sh_flags & SHF_EXECINSTR)
      return kCode;
    return section.sh_flags & SHF_WRITE ? kData : kConstants;
  }

  void placeSections() {
    for (const Elf64_Sym &symbol : symbols)
      if (symbol.st_shndx == SHN_UNDEF && symbol.st_name)
        externals.emplace(getName(symbol), externals.size());
    places.assign(sections.size(), 0);
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (int part = 0; part < kNumParts; ++part) {
      size = partStarts[part] = alignTo(size, page);
      for (size_t i = 0; i < sections.size(); ++i) {
        if (!isLoaded(i) || getPart(sections[i]) != part)
          continue;
        if (sections[i].sh_size > bytes.size() + (1u << 30))
          refuse("expected less than a GiB of zeros");
        places[i] =
            alignTo(size, std::max<size_t>(1, sections[i].sh_addralign));
        size = places[i] + sections[i].sh_size;
      }
      // Code is followed by the stubs, constants by the addresses behind them.
      if (part == kCode)
        size = (stubs = alignTo(size, 16)) + externals.size() * kStubBytes;
      if (part == kConstants)
        size = (addresses = alignTo(size, 16)) + externals.size() * 8;
      partEnds[part] = size;
    }
    // Within the reach of 32-bit displacements.
    if (size > size_t(std::numeric_limits<int32_t>::max()))
      refuse("expected less than 2 GiB of code and data");
  }

  std::string getName(const Elf64_Sym &symbol) const {
    if (symbol.st_name >= names.size())
      refuse("expected a symbol's name within the table of names");
    std::string_view rest = names.substr(symbol.st_name);
    return std::string(rest.substr(0, rest.find('\0')));
  }

  /// The offset of a defined symbol in the mapping.
  size_t getPlace(const Elf64_Sym &symbol) const {
    if (!isLoaded(symbol.st_shndx) ||
        symbol.st_value > sections[symbol.st_shndx].sh_size)
      refuse("expected symbol '" + getName(symbol) + "' in a loaded section");
    return places[symbol.st_shndx] + symbol.st_value;
  }

  size_t getExternal(const Elf64_Sym &symbol) const {
    auto external = externals.find(getName(symbol));
    if (external == externals.end())
      refuse("expected a name for each function that the code calls, found a "
             "relocation to a symbol without one");
    return external->second;
  }

  void bindExternals() {
    std::string missing;
    for (const auto &[name, index] : externals) {
      auto address = reinterpret_cast<uint64_t>(findHostSymbol(name));
      if (!address)
        missing += (missing.empty() ? "" : ", ") + name;
      std::memcpy(base + addresses + 8 * index, &address, 8);
      // jmp *displacement(%rip), two bytes and the displacement from its end.
      uint8_t *stub = base + stubs + kStubBytes * index;
      auto displacement = static_cast<int32_t>(
          (addresses + 8 * index) - (stubs + kStubBytes * index + 6));
      stub[0] = 0xff;
      stub[1] = 0x25;
      std::memcpy(stub + 2, &displacement, 4);
    }
    if (!missing.empty())
      refuse("expected the code to call only functions that this runtime has, "
             "found calls of " +
             missing + "; compile it again");
  }

  void write32(size_t place, int64_t value) const {
    auto narrow = static_cast<int32_t>(value);
    if (narrow != value)
      refuse("expected a 32-bit displacement, found a larger one");
    std::memcpy(base + place, &narrow, 4);
  }

  void relocate(const Elf64_Shdr &section) {
    size_t start = places[section.sh_info];
    size_t length = sections[section.sh_info].sh_size;
    for (const Elf64_Rela &entry : readTable<Elf64_Rela>(
             section.sh_offset, section.sh_size / sizeof(Elf64_Rela))) {
      uint64_t index = ELF64_R_SYM(entry.r_info);
      uint32_t type = ELF64_R_TYPE(entry.r_info);
      size_t width = type == R_X86_64_64 || type == R_X86_64_PC64 ? 8 : 4;
      if (index >= symbols.size() || entry.r_offset > length ||
          width > length - entry.r_offset)
        refuse("expected a relocation within its section");
      relocate(type, start + entry.r_offset, symbols[index], entry.r_addend);
    }
  }

  void relocate(uint32_t type, size_t place, const Elf64_Sym &symbol,
                int64_t addend) const {
    bool isExternal = symbol.st_shndx == SHN_UNDEF;
    size_t external = isExternal ? getExternal(symbol) : 0;
    // Calls go to a stub: the process may be farther away than 2 GiB.
    size_t target =
        isExternal ? stubs + kStubBytes * external : getPlace(symbol);
    auto relative = [&](size_t to) {
      return static_cast<int64_t>(to) + addend - static_cast<int64_t>(place);
    };
    switch (type) {
    case R_X86_64_PLT32:
    case R_X86_64_PC32:
      return write32(place, relative(target));
    case R_X86_64_GOTPCREL:
    case R_X86_64_GOTPCRELX:
    case R_X86_64_REX_GOTPCRELX:
      if (!isExternal)
        refuse("expected a table entry for a function of the process only");
      return write32(place, relative(addresses + 8 * external));
    case R_X86_64_PC64: {
      int64_t value = relative(target);
      std::memcpy(base + place, &value, 8);
      return;
    }
    case R_X86_64_64: {
      auto value = reinterpret_cast<uint64_t>(base + target) + addend;
      std::memcpy(base + place, &value, 8);
      return;
    }
    default:
      refuse("expected position-independent code, found relocation type " +
             std::to_string(type));
    }
  }

  std::string_view bytes, names;
  std::vector<Elf64_Shdr> sections;
  std::vector<Elf64_Sym> symbols;
  /// Functions of the process, numbered.
  std::map<std::string, size_t> externals;
  /// The offset of each loaded section.
  std::vector<size_t> places;
  size_t partStarts[kNumParts], partEnds[kNumParts];
  size_t stubs = 0, addresses = 0, size = 0;
  uint8_t *base = nullptr;
};

} // namespace

ObjectCode::ObjectCode(std::string_view bytes) {
  Linker linker(bytes);
  size = linker.getSize();
  memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    refuse(std::string("cannot get memory for the code: ") + strerror(errno));
  try {
    linker.link(static_cast<uint8_t *>(memory));
    linker.protect();
    symbols = linker.getGlobals();
  } catch (...) {
    munmap(memory, size);
    throw;
  }
}

ObjectCode::~ObjectCode() { munmap(memory, size); }

void *ObjectCode::find(std::string_view name) const {
  auto found = symbols.find(name);
  return found == symbols.end() ? nullptr : found->second;
}

} // namespace moe::runtime
