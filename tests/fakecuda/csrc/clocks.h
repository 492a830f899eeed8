// Time on the fake GPUs.
//
// A stream counts its operations. A clock says, for each stream of a device, up to which of its operations is
// known to have ended. A stream learns from the events that it waits for, the host learns when it synchronises,
// and an operation knows what the host knew at its launch. What a device does has no duration: an operation is
// over only for those who know it.
#pragma once
#include <c10/core/Stream.h>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace fakecuda {

constexpr int DEVICES = 16;
using Time = uint64_t;

class Clock {
 public:
  Time of(c10::StreamId stream) const { return size_t(stream) < known_.size() ? known_[stream] : 0; }
  void learn(c10::StreamId stream, Time time) {
    if (known_.size() <= size_t(stream)) known_.resize(stream + 1);
    known_[stream] = std::max(known_[stream], time);
  }
  void learn(const Clock& other) {
    if (known_.size() < other.known_.size()) known_.resize(other.known_.size());
    for (size_t i = 0; i < other.known_.size(); i++) known_[i] = std::max(known_[i], other.known_[i]);
  }
  bool covers(const Clock& other) const {
    for (size_t i = 0; i < other.known_.size(); i++)
      if (of(i) < other.known_[i]) return false;
    return true;
  }

 private:
  std::vector<Time> known_;
};

class Graph;

struct Stream {
  Clock clock;                 // what its next operation knows
  Graph* capturing = nullptr;  // the graph that records it
};

struct Device {
  std::vector<Stream> streams{1};  // 0 is the default stream
  Clock host;                      // what the host knows of this device
};

// A moment of a stream: all its operations so far.
struct Moment {
  int device;
  c10::StreamId stream;
  Time time;
};

struct Event {
  int device = 0;
  Clock clock;
  bool recorded = false, captured = false, timed = false;
  int asked = 0;  // by queries since it was recorded
  double at_ms = 0;
};

// All state of the process is under one lock. It is never held while Python runs or a tensor is freed.
inline std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
inline std::array<Device, DEVICES> devices;
inline std::map<std::string, long> counts;  // what happened -> how often
inline std::vector<std::string> races;
constexpr size_t MOST_RACES = 200;

inline thread_local int device_now = 0;
inline thread_local std::array<c10::StreamId, DEVICES> stream_now{};

inline Stream& stream(int device, c10::StreamId id) {
  auto& streams = devices.at(device).streams;
  if (streams.size() <= size_t(id)) streams.resize(id + 1);
  return streams[id];
}
inline c10::StreamId new_stream(int device) {
  Lock lock(mutex);
  devices.at(device).streams.emplace_back();
  return devices[device].streams.size() - 1;
}
inline Stream& current(int device) { return stream(device, stream_now[device]); }
inline Moment now(int device) { return {device, stream_now[device], current(device).clock.of(stream_now[device])}; }
inline bool knows(const Clock& clock, const Moment& moment) { return clock.of(moment.stream) >= moment.time; }
inline bool host_knows(const Moment& moment) { return knows(devices[moment.device].host, moment); }

// The next operation of a stream.
inline Moment launch(int device, c10::StreamId id) {
  auto& clock = stream(device, id).clock;
  clock.learn(devices[device].host);
  Time time = clock.of(id) + 1;
  clock.learn(id, time);
  return {device, id, time};
}
inline Moment launch(int device) {
  counts["launches"]++;
  return launch(device, stream_now[device]);
}

inline void race(const std::string& text) {
  counts["races"]++;
  if (races.size() < MOST_RACES) races.push_back(text);
}
inline std::string name(const Moment& moment) {
  return "stream " + std::to_string(moment.stream) + " of GPU " + std::to_string(moment.device);
}
inline double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace fakecuda
