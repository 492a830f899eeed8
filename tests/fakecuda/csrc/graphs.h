// CUDA graphs: the operations of a stream are recorded with the addresses of what they use, and replayed there.
//
// A GPU does not compute what it records. Here a kernel runs once for the shapes of its results, on memory of
// the graph's pool that is zero; whatever else it has changed is put back when the recording ends. A replay
// begins with garbage in all memory that the graph does not find filled: what was free when it was recorded, and
// what it makes itself. What the driver refuses is refused, and spoils the recording.
#pragma once
#include <functional>
#include <set>
#include "pinned.h"

namespace fakecuda {

inline int pools = 0;  // private pools made so far

class Graph {
 public:
  struct Node {
    const std::string* op;
    std::vector<std::pair<Range, bool>> uses;  // range, whether it is written
    std::function<void()> run;
  };

  void begin(int pool) {
    Lock lock(mutex);
    device_ = device_now, stream_ = stream_now[device_];
    TORCH_CHECK(stream_ != 0, "CUDA graphs must be captured on a non-default stream");
    TORCH_CHECK(!current(device_).capturing, "this stream is capturing already");
    pool_ = pool ? pool : ++pools;
    for (auto& [key, spare] : memory.free)
      if (std::get<2>(key) == pool_) garbage_.insert(spare.begin(), spare.end());
    current(device_).capturing = this;
  }
  void end() {
    Lock lock(mutex);
    auto& recorded = stream(device_, stream_);
    TORCH_CHECK(recorded.capturing == this, "no capture of this graph is under way");
    recorded.capturing = nullptr;
    for (auto change = changed_.rbegin(); change != changed_.rend(); ++change)
      memcpy(memory.bytes_at(change->first), change->second.data(), change->second.size());
    for (char* at : fresh_) memset(memory.bytes_at(at), GARBAGE, memory.blocks.at(at).bytes);
    garbage_.insert(fresh_.begin(), fresh_.end());
    changed_.clear(), fresh_.clear();
    TORCH_CHECK(spoilt_.empty(), "CUDA error: operation failed due to a previous error during capture (", spoilt_, ")");
  }
  void replay() {
    std::unique_lock lock(mutex);
    TORCH_CHECK(!current(device_now).capturing, "a graph cannot be replayed while its stream is capturing");
    TORCH_CHECK(device_ == device_now, "the graph was recorded on GPU ", device_, ", and GPU ", device_now, " is current");
    counts["graph replays"]++;
    for (char* at : garbage_) {
      auto block = memory.blocks.find(at);
      if (block == memory.blocks.end()) continue;
      if (!block->second.filled) memset(memory.bytes_at(at), GARBAGE, block->second.bytes);
    }
    lock.unlock();
    for (auto& node : nodes_) {
      lock.lock();
      auto when = launch(device_);
      for (auto& [range, write] : node.uses) touch(range, write, when, *node.op);
      lock.unlock();
      node.run();
    }
    lock.lock();
    for (char* at : garbage_)
      if (auto block = memory.blocks.find(at); block != memory.blocks.end()) block->second.filled = false;
  }
  void add(Node node) { nodes_.push_back(std::move(node)); }
  char* allocate(size_t bytes) {
    char* at = memory.allocate(bytes, pool_, 0);
    fresh_.insert(at);
    return at;
  }
  // A kernel will write here while it is recorded.
  void will_change(const Range& range) {
    auto* block = memory.block_of(range.begin);
    if (!block || fresh_.count(block->at)) return;
    char* bytes = memory.bytes_at(range.begin);
    changed_.emplace_back(range.begin, std::vector<char>(bytes, bytes + (range.end - range.begin)));
  }
  void spoil(const std::string& what) { if (spoilt_.empty()) spoilt_ = what; }
  int pool() const { return pool_; }
  size_t size() const { return nodes_.size(); }
  ~Graph() {
    Lock lock(mutex);
    for (auto& device : devices)
      for (auto& each : device.streams)
        if (each.capturing == this) each.capturing = nullptr;
  }

 private:
  int device_ = 0, pool_ = 0;
  c10::StreamId stream_ = 0;
  std::vector<Node> nodes_;
  std::set<char*> garbage_, fresh_;  // blocks: without content when a replay begins; made in this recording
  std::vector<std::pair<char*, std::vector<char>>> changed_;
  std::string spoilt_;
};

// What the driver does not permit on a stream that is being recorded.
inline void refuse_in_capture(int device, c10::StreamId id, const std::string& what) {
  Lock lock(mutex);
  if (auto* graph = stream(device, id).capturing) {
    graph->spoil(what);
    TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing: ", what);
  }
}
inline void refuse_in_any_capture(int device, const std::string& what) {
  for (size_t id = 0; id < devices[device].streams.size(); id++) refuse_in_capture(device, id, what);
}

}  // namespace fakecuda
