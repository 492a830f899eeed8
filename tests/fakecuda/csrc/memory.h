// Memory of the fake GPUs, and who uses it.
//
// Device memory is mapped twice: tensors hold addresses to which nobody has access, so that a host which touches
// them dies, and kernels use the second mapping. Freed memory goes back at once to the pool of its stream, as
// torch's caching allocator has it, and is no number until somebody writes to it. Each use of a range of bytes is
// compared with the uses before it: without record_stream, or a wait, it is a race.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>
#include <tuple>
#include "clocks.h"

namespace fakecuda {

constexpr size_t SPACE = size_t(4) << 30;  // addresses of a device; pages exist when they are written
constexpr int GARBAGE = 0xff;              // as a float it is NaN, as an index it is out of range

struct Use {
  char *begin, *end;
  bool write;
  Moment when;
  const std::string* op;
};

struct Block {
  char* at;
  size_t bytes;
  int device;
  c10::StreamId home;
  int pool;                              // 0, or the private pool of graphs
  bool live = false, filled = false;     // filled: written outside of graphs since the last replay
  std::vector<c10::StreamId> used_by;    // other streams (record_stream)
  std::vector<Use> uses;                 // which a later use must know
};

struct Memory {
  char *seen = nullptr, *real = nullptr;  // what tensors hold, and where the bytes are
  std::array<size_t, DEVICES> top{}, in_use{}, peak{};
  std::map<char*, Block> blocks;
  std::map<std::tuple<int, c10::StreamId, int, size_t>, std::vector<char*>> free;  // device, stream, pool, bytes
  std::vector<std::pair<char*, Clock>> waiting;  // freed, in use by other streams until then

  void start() {
    if (seen) return;
    int file = memfd_create("fakecuda", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, SPACE * DEVICES) == 0, "no memory for fake GPUs");
    auto map = [&](int access) { return (char*)mmap(nullptr, SPACE * DEVICES, access, MAP_SHARED | MAP_NORESERVE, file, 0); };
    seen = map(PROT_NONE), real = map(PROT_READ | PROT_WRITE);
    close(file);
    TORCH_CHECK(seen != MAP_FAILED && real != MAP_FAILED, "no addresses for fake GPUs");
  }
  bool owns(const void* at) const { return seen && (char*)at >= seen && (char*)at < seen + SPACE * DEVICES; }
  char* bytes_at(const void* at) const { return owns(at) ? real + ((char*)at - seen) : (char*)at; }
  // What tensors hold for an address of the second mapping; null for other addresses.
  char* seen_at(const void* at) const {
    return real && (char*)at >= real && (char*)at < real + SPACE * DEVICES ? seen + ((char*)at - real) : nullptr;
  }
  Block* block_of(const void* at) {
    auto next = blocks.upper_bound((char*)at);
    if (next == blocks.begin()) return nullptr;
    auto& block = std::prev(next)->second;
    return (char*)at < block.at + block.bytes ? &block : nullptr;
  }
  std::vector<char*>& free_of(const Block& b) { return free[{b.device, b.home, b.pool, b.bytes}]; }

  // `before` is called with a block and its size, before it gets its content.
  template <typename F>
  char* allocate(size_t asked, int pool, int content, F before) {
    start();
    size_t bytes = (asked + 511) / 512 * 512;
    const int device = device_now;
    auto& spare = free[{device, stream_now[device], pool, bytes}];
    char* at;
    if (!spare.empty()) {
      at = spare.back(), spare.pop_back();
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, top[device] + bytes <= SPACE, "CUDA out of memory (fake GPU ", device, ")");
      at = seen + device * SPACE + top[device], top[device] += bytes;
      blocks[at] = {at, bytes, device, stream_now[device], pool};
    }
    auto& block = blocks.at(at);
    block.live = true;
    in_use[device] += bytes, peak[device] = std::max(peak[device], in_use[device]);
    before(at, bytes);
    memset(bytes_at(at), content, bytes);
    return at;
  }
  void release(char* at) {
    auto& block = blocks.at(at);
    block.live = false, in_use[block.device] -= block.bytes;
    if (!block.pool) memset(bytes_at(at), GARBAGE, block.bytes);
    if (block.used_by.empty()) return free_of(block).push_back(at);
    Clock until;
    for (auto id : block.used_by) until.learn(id, stream(block.device, id).clock.of(id));
    waiting.emplace_back(at, until);
  }
  // The host knows more: freed memory that other streams used may be used again.
  void host_learned() {
    for (size_t i = waiting.size(); i--;) {
      auto& block = blocks.at(waiting[i].first);
      if (!devices[block.device].host.covers(waiting[i].second)) continue;
      block.used_by.clear(), free_of(block).push_back(block.at);
      waiting.erase(waiting.begin() + i);
    }
  }
  // The next test begins: nothing has happened yet.
  void forget() {
    for (auto& [at, block] : blocks) block.uses.clear(), block.used_by.clear(), block.filled = false;
    for (auto& [at, until] : waiting) free_of(blocks.at(at)).push_back(at);
    waiting.clear();
    bool empty = std::all_of(in_use.begin(), in_use.end(), [](size_t bytes) { return !bytes; });
    if (!empty || !seen) return;
    blocks.clear(), free.clear(), top.fill(0);
    madvise(real, SPACE * DEVICES, MADV_REMOVE);
  }
};
inline Memory memory;

// The bytes from a tensor's first element to its last.
struct Range {
  char *begin = nullptr, *end = nullptr;
  explicit Range(const at::Tensor& t) {
    if (!t.defined() || !t.numel()) return;
    begin = (char*)t.data_ptr();
    int64_t span = 1;
    for (int i = 0; i < t.dim(); i++) span += (t.size(i) - 1) * t.stride(i);
    end = begin + span * t.itemsize();
  }
  bool empty() const { return begin == end; }
};

// An operation reads or writes a range of device memory. A use that a later write has seen needs no keeping.
inline void touch(const Range& range, bool write, const Moment& when, const std::string& op) {
  Block* block = range.empty() || !memory.owns(range.begin) ? nullptr : memory.block_of(range.begin);
  if (!block) return;
  auto& clock = stream(when.device, when.stream).clock;
  auto known = [&](const Use& use) { return use.when.stream == when.stream || knows(clock, use.when); };
  for (auto& use : block->uses)
    if (use.begin < range.end && range.begin < use.end && (write || use.write) && !known(use))
      race(op + (write ? " writes on " : " reads on ") + name(when) + " what " + *use.op + (use.write ? " wrote on " : " read on ") +
           name(use.when));
  auto over = [&](const Use& use) {
    return use.begin >= range.begin && use.end <= range.end && known(use) && (write || (!use.write && use.when.stream == when.stream));
  };
  block->uses.erase(std::remove_if(block->uses.begin(), block->uses.end(), over), block->uses.end());
  block->uses.push_back({range.begin, range.end, write, when, &op});
  block->filled |= write;
}

}  // namespace fakecuda
