// Pinned memory of the host, and copies under way.
//
// A copy down (device to host) that does not block arrives when the host learns that it has ended; until then
// its target is garbage. A copy up reads the host's bytes at some time before it ends: they must be, when the
// host learns of its end, what they were at its launch.
#pragma once
#include <cstring>
#include "memory.h"

namespace fakecuda {

class Pinned {
 public:
  bool has(const void* at) {
    Lock lock(mutex);
    auto next = live_.upper_bound((char*)at);
    if (next == live_.begin()) return false;
    --next;
    return (char*)at < next->first + next->second;
  }
  void* allocate(size_t bytes) {
    void* at = nullptr;
    if (bytes) TORCH_CHECK(!posix_memalign(&at, 4096, bytes), "no pinned memory");
    Lock lock(mutex);
    if (at) live_[(char*)at] = bytes;
    return at;
  }
  // torch's allocator keeps freed memory until the copies under way have ended.
  void release(void* at) {
    {
      Lock lock(mutex);
      auto it = live_.find((char*)at);
      if (it != live_.end()) {
        char *begin = it->first, *end = begin + it->second;
        drop(down_, begin, end, [](auto&) {});
        drop(up_, begin, end, [](auto& copy) { check(copy); });
        live_.erase(it);
      }
    }
    free(at);
  }
  // A copy down has been launched; the bytes are in their target already.
  void begin_down(char* begin, char* end, const Moment& when) {
    order_down(begin, end, when);
    down_.push_back({begin, end, when, 0, std::vector<char>(begin, end)});
    memset(begin, GARBAGE, end - begin);
  }
  // A copy that writes these bytes comes: what it must wait for.
  void order_down(char* begin, char* end, const Moment& when) {
    drop(up_, begin, end, [&](auto& copy) {
      check(copy);
      if (unordered(copy, when)) race("a copy down on " + name(when) + " writes what a copy up on " + name(copy.when) + " reads");
    });
    drop(down_, begin, end, [&](auto& copy) {
      if (unordered(copy, when)) race("a copy down on " + name(when) + " and one on " + name(copy.when) + " have the same target");
      if (copy.begin < begin || copy.end > end) arrive(copy);
    });
  }
  // A copy that reads these bytes comes: what it must wait for.
  void order_up(char* begin, char* end, const Moment& when) {
    drop(down_, begin, end, [&](auto& copy) {
      if (unordered(copy, when)) race("a copy up on " + name(when) + " reads what a copy down on " + name(copy.when) + " writes");
      arrive(copy);
    });
  }
  void begin_up(char* begin, char* end, const Moment& when) {
    up_.push_back({begin, end, when, sum(begin, end), {}});
  }
  void host_learned() {
    finish(down_, [](auto& copy) { arrive(copy); });
    finish(up_, [](auto& copy) { check(copy); });
  }
  void forget() { down_.clear(), up_.clear(); }

 private:
  struct Copy {
    char *begin, *end;
    Moment when;
    uint64_t content;         // of a copy up: a hash of what it read
    std::vector<char> bytes;  // of a copy down
  };
  std::map<char*, size_t> live_;
  std::vector<Copy> down_, up_;

  static uint64_t sum(const char* begin, const char* end) {
    uint64_t hash = 1469598103934665603ull;  // FNV-1a
    for (; begin < end; begin++) hash = (hash ^ (unsigned char)*begin) * 1099511628211ull;
    return hash;
  }
  static void check(const Copy& copy) {
    if (sum(copy.begin, copy.end) != copy.content) race("the host writes to pinned memory that a copy up on " + name(copy.when) + " reads");
  }
  static void arrive(const Copy& copy) { memcpy(copy.begin, copy.bytes.data(), copy.bytes.size()); }
  static bool unordered(const Copy& copy, const Moment& when) {
    if (copy.when.device != when.device) return !host_knows(copy.when);
    return copy.when.stream != when.stream && !knows(stream(when.device, when.stream).clock, copy.when);
  }
  template <typename F>
  static void drop(std::vector<Copy>& copies, char* begin, char* end, F each) {
    for (size_t i = copies.size(); i--;)
      if (copies[i].begin < end && begin < copies[i].end) each(copies[i]), copies.erase(copies.begin() + i);
  }
  template <typename F>
  static void finish(std::vector<Copy>& copies, F each) {  // in the order of their launch
    std::vector<Copy> left;
    for (auto& copy : copies) {
      if (host_knows(copy.when)) each(copy);
      else left.push_back(std::move(copy));
    }
    copies.swap(left);
  }
};
inline Pinned pinned;

// The host has learned something of a device. The caller holds the lock.
inline void host_learns(int device, const Clock& clock) {
  devices[device].host.learn(clock);
  pinned.host_learned();
  memory.host_learned();
}

}  // namespace fakecuda
